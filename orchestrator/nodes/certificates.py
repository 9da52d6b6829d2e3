"""OpenSSH certificates: the key that one is for, and whether a host's is good for its name.

The format is that of PROTOCOL.certkeys in OpenSSH; it is read, and its signature verified, by `cryptography`. Keys and
certificates are `TYPE BASE64` throughout.
"""

from __future__ import annotations

import base64
import time
from datetime import datetime

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.hazmat.primitives.serialization.ssh import SSHCertificate, SSHCertificateType, load_ssh_public_identity

SUFFIX = "-cert-v01@openssh.com"


def certified_key(certificate: str) -> str | None:
    """The public key that a certificate is for; None for what is no certificate, or of a kind that cannot be read."""
    read = _read(certificate)
    return _written(read.public_key()) if read else None


def authority_of(certificate: str) -> str | None:
    """The public key of the authority that a certificate names; whether it signed it is for `host_fault` to say."""
    read = _read(certificate)
    return _written(read.signature_key()) if read else None


def expiry_of(certificate: str) -> str:
    """When a certificate expired, in words that follow its name; empty for one that has not."""
    read = _read(certificate)
    return f" (expired on {_date(read.valid_before)})" if read and time.time() >= read.valid_before else ""


def host_fault(certificate: str, name: str) -> str | None:
    """Why a certificate does not vouch for the host `name`, whoever signed it; None where it does. As OpenSSH judges it.

    Args:
        name: without a port, in small letters.
    """
    read = _read(certificate)
    if read is None:
        return "it cannot be read"
    now = time.time()
    principals = [principal.decode(errors="replace") for principal in read.valid_principals]
    if read.type is not SSHCertificateType.HOST:
        return "it is a user's, not a host's"
    if not _is_signed(certificate, read):
        return "its signature is not its authority's"
    if now < read.valid_after:
        return f"it is not valid before {_date(read.valid_after)}"
    if now >= read.valid_before:
        return f"it expired on {_date(read.valid_before)}"
    if read.critical_options:
        return f"it has options that no host's may have: {b', '.join(read.critical_options).decode(errors='replace')}"
    if principals and name not in principals:
        return f"it is for {', '.join(principals)}, not for {name}"
    return None


def _read(certificate: str) -> SSHCertificate | None:
    try:
        read = load_ssh_public_identity(certificate.encode())
    except (ValueError, UnsupportedAlgorithm):
        return None
    return read if isinstance(read, SSHCertificate) else None


def _is_signed(certificate: str, read: SSHCertificate) -> bool:
    authority = read.signature_key()
    if isinstance(authority, RSAPublicKey):
        # The signature is the certificate's last field: its algorithm, its length, as many bytes. SHA-1 is not taken.
        content = base64.b64decode(certificate.split()[1])[: -authority.key_size // 8 - 4]
        if not content.endswith((b"rsa-sha2-512", b"rsa-sha2-256")):
            return False
    try:
        read.verify_cert_signature()
    except (InvalidSignature, ValueError):
        return False
    return True


def _written(key: object) -> str:
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()  # type: ignore[attr-defined,no-any-return]


def _date(time_s: int) -> str:
    """Local time, to the minute; far beyond the calendar for some that never expire."""
    try:
        return datetime.fromtimestamp(time_s).astimezone().strftime("%Y-%m-%d %H:%M %Z")
    except (ValueError, OverflowError, OSError):
        return "no day of the calendar"
