"""A login by password or, where sshd has that instead, by the one question of its keyboard-interactive method."""

from __future__ import annotations

import paramiko

PASSWORD_METHODS = frozenset({"password", "keyboard-interactive"})


class WrongPassword(paramiko.AuthenticationException):
    """The server did not take the password."""


class PasswordLogin:
    """Logs in to one server with a password, which is forgotten at once. It is what paramiko calls an AuthStrategy."""

    key_file: str | None = None

    def __init__(self, user: str, password: str) -> None:
        self._user = user
        self._password = password

    def authenticate(self, transport: paramiko.Transport) -> list[str]:
        """Raises WrongPassword, or AuthenticationException where a password is not, or not all, that the server wants."""
        password, self._password = self._password, ""
        methods = login_methods(transport, self._user)
        if transport.is_authenticated():  # it wants nothing at all
            return []
        try:
            if "password" in methods:
                further = transport.auth_password(self._user, password, fallback=False)
            elif "keyboard-interactive" in methods:
                further = transport.auth_interactive(self._user, _Answers(password))
            else:
                raise paramiko.AuthenticationException("it takes no password")
        except _OtherQuestion as error:
            raise paramiko.AuthenticationException(f"it asks {error}, which needs a person: log in there once with ssh") from None
        except paramiko.AuthenticationException as error:
            if "timeout" in str(error):
                raise TimeoutError from None
            if PASSWORD_METHODS & methods:
                raise WrongPassword from None
            raise
        if further:
            raise paramiko.AuthenticationException(f"after the password it also wants {', '.join(further)}")
        return []


def login_methods(transport: paramiko.Transport, user: str) -> frozenset[str]:
    """The ways to log in that a server offers, such as "publickey". Asked first, it is no failure to sshd."""
    try:
        transport.auth_none(user)
    except paramiko.BadAuthenticationType as error:
        return frozenset(error.allowed_types)
    except (paramiko.SSHException, EOFError):
        return frozenset()
    return frozenset()


class _OtherQuestion(paramiko.SSHException):
    """The server asks for something else than the password: a code, or a new password for one that has expired."""


class _Answers:
    """Answers the first question whose answer is not to be shown; any other is not for us."""

    def __init__(self, password: str) -> None:
        self._password: str | None = password

    def __call__(self, title: str, instructions: str, questions: list[tuple[str, bool]]) -> list[str]:
        if not questions:
            return []
        password, self._password = self._password, None
        (question, is_shown), *others = questions
        if password is None or is_shown or others:
            raise _OtherQuestion(repr(question.strip()[:100]))
        return [password]
