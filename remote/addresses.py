"""How this machine stands in the network: its cards and addresses, what its own name resolves to, which ports are free.

The kernel is asked for addresses over netlink, as `ip address` does (minimal nodes have no such program, and some
Pythons no ctypes to call getifaddrs). Where netlink is forbidden, older interfaces tell less: one IPv4 address per
card. What a card is made of stands in sysfs.
"""

import errno
import fcntl
import os
import socket
import struct
import sys
import threading

RTM_GETLINK, RTM_NEWLINK, RTM_GETADDR, RTM_NEWADDR = 18, 16, 22, 20
NLMSG_ERROR, NLMSG_DONE = 2, 3
REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
IFLA_IFNAME, IFA_ADDRESS, IFA_LOCAL, IFA_FLAGS = 3, 1, 2, 8
IFF_UP, IFF_LOOPBACK, IFF_RUNNING = 0x1, 0x8, 0x40
# IPv6 addresses that are temporary, duplicate, deprecated or not yet checked: none of them serves a long run.
UNRELIABLE_IPV6 = 0x01 | 0x08 | 0x20 | 0x40
SIOCGIFFLAGS, SIOCGIFADDR, SIOCGIFNETMASK = 0x8913, 0x8915, 0x891B
NETLINK_TIMEOUT_S = 2.0
RESOLVE_TIMEOUT_S = 2.0  # a name server that does not answer holds getaddrinfo for 10 s and more
FREE_PORTS_COUNT = 3


def read_interfaces():
    """Every card: {"name", "addresses": ["10.0.0.10/24"], "up", "loopback", "speed_mbps" or None, "kind"}."""
    try:
        cards = ask_netlink()
    except OSError as error:
        note("netlink does not answer ({}); reading addresses the old way".format(error))
        cards = ask_ioctl()
    return [describe(name, flags, addresses) for name, flags, addresses in cards]


def describe(name, flags, addresses):
    loopback = bool(flags & IFF_LOOPBACK)
    return {
        "name": name,
        "addresses": addresses,
        "up": flags & (IFF_UP | IFF_RUNNING) == IFF_UP | IFF_RUNNING,  # running: a carrier is there
        "loopback": loopback,
        "speed_mbps": read_speed(name),
        "kind": "loopback" if loopback else read_kind(name),
    }


def read_speed(name):
    """The link's speed in Mbit/s; None where the driver does not know (it then says -1, or refuses)."""
    try:
        with open("/sys/class/net/{}/speed".format(name)) as stream:
            speed = int(stream.read())
    except (OSError, ValueError):
        return None
    return speed if speed > 0 else None


def read_kind(name, directory="/sys/class/net"):
    """ "physical", "bridge" or "virtual".

    A bond or VLAN stands on a real card and counts as one; so does a bridge with a real card among its ports, which
    carries a virtualisation host's own address. The other bridges (docker0, virbr0) exist on each machine for itself.
    A container's card (veth) is virtual: usable, but any real card is better.
    """
    card = os.path.join(directory, name)
    if os.path.isdir(os.path.join(card, "bridge")):
        ports = list_names(os.path.join(card, "brif"))
        return "physical" if any(stands_on_device(os.path.join(directory, port)) for port in ports) else "bridge"
    return "physical" if stands_on_device(card) else "virtual"


def stands_on_device(card):
    return os.path.exists(os.path.join(card, "device")) or any(name.startswith("lower_") for name in list_names(card))


def list_names(directory):
    try:
        return os.listdir(directory)
    except OSError:
        return []


# ---------------------------------------------------------------------------------------------------------------------
# Netlink


def ask_netlink():
    """[(name, flags, addresses)] in the order of the kernel's card numbers. Raises OSError where netlink is refused."""
    cards = {}
    for index, flags, attributes in links():
        name = attributes[IFLA_IFNAME].rstrip(b"\0").decode("utf-8", "replace")
        cards[index] = (name, flags, [])
    for index, address in addresses():
        if index in cards:
            cards[index][2].append(address)
    return [cards[index] for index in sorted(cards)]


def links():
    for body in dump(RTM_GETLINK, RTM_NEWLINK):
        _, _, index, flags, _ = struct.unpack_from("=BxHiII", body)
        yield index, flags, parse_attributes(body[16:])


def addresses():
    for body in dump(RTM_GETADDR, RTM_NEWADDR):
        family, prefix, flags, _, index = struct.unpack_from("=BBBBI", body)
        attributes = parse_attributes(body[8:])
        packed = attributes.get(IFA_LOCAL) or attributes.get(IFA_ADDRESS)  # IFA_ADDRESS is the peer on point-to-point links
        if IFA_FLAGS in attributes:
            flags = struct.unpack("=I", attributes[IFA_FLAGS])[0]
        unreliable = family == socket.AF_INET6 and flags & UNRELIABLE_IPV6
        if packed and family in (socket.AF_INET, socket.AF_INET6) and not unreliable:
            yield index, "{}/{}".format(socket.inet_ntop(family, packed), prefix)


def dump(question, answer):
    """The bodies of all answers to one netlink question."""
    bodies = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as link:
        link.settimeout(NETLINK_TIMEOUT_S)
        link.bind((0, 0))
        link.send(struct.pack("=IHHIIB3x", 20, question, REQUEST_DUMP, 1, 0, socket.AF_UNSPEC))
        while True:
            for kind, body in parse_messages(link.recv(1 << 18)):
                if kind == NLMSG_DONE:
                    return bodies
                if kind == NLMSG_ERROR:
                    code = -struct.unpack_from("=i", body)[0]
                    raise OSError(code, os.strerror(code))
                if kind == answer:
                    bodies.append(body)


def parse_messages(data):
    while len(data) >= 16:
        length, kind = struct.unpack_from("=IH", data)
        yield kind, data[16:length]
        data = data[aligned(length) :]


def parse_attributes(data):
    attributes = {}
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        attributes[kind] = data[4:length]
        data = data[aligned(max(length, 4)) :]
    return attributes


def aligned(length):
    return (length + 3) & ~3


# ---------------------------------------------------------------------------------------------------------------------
# Without netlink


def ask_ioctl():
    """[(name, flags, addresses)] as ask_netlink, from ioctl and /proc/net/if_inet6."""
    ipv6 = read_if_inet6()
    cards = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        for name in list_cards():
            request = struct.pack("256s", name.encode()[:15])
            flags = struct.unpack_from("=16xH", fcntl.ioctl(handle, SIOCGIFFLAGS, request))[0]
            cards.append((name, flags, ipv4_by_ioctl(handle, request) + ipv6.get(name, [])))
    return cards


def ipv4_by_ioctl(handle, request):
    try:
        address = fcntl.ioctl(handle, SIOCGIFADDR, request)[20:24]
        mask = fcntl.ioctl(handle, SIOCGIFNETMASK, request)[20:24]
    except OSError:  # the card has no IPv4 address
        return []
    return ["{}/{}".format(socket.inet_ntoa(address), bin(struct.unpack("=I", mask)[0]).count("1"))]


def list_cards():
    with open("/proc/net/dev") as stream:
        return [line.partition(":")[0].strip() for line in stream if ":" in line]


def read_if_inet6():
    """{card: addresses}; empty where the kernel has no IPv6."""
    found = {}
    try:
        with open("/proc/net/if_inet6") as stream:
            rows = [line.split() for line in stream]
    except OSError:
        return found
    for packed, _, prefix, _, flags, name in rows:
        if not int(flags, 16) & UNRELIABLE_IPV6:
            address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(packed))
            found.setdefault(name, []).append("{}/{}".format(address, int(prefix, 16)))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Its name and its ports


class Resolution:
    """What the machine's own name resolves to, looked up beside the other work: name servers may be slow or silent."""

    def __init__(self, hostname):
        self.hostname = hostname
        self.found = []
        self.thread = threading.Thread(target=self.look_up)
        self.thread.daemon = True
        self.thread.start()

    def look_up(self):
        try:
            answers = socket.getaddrinfo(self.hostname, None, 0, socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            note("this machine's name {!r} does not resolve: {}".format(self.hostname, error))
        else:
            self.found = sorted({answer[4][0] for answer in answers})

    def wait(self):
        """The addresses; none where the name does not resolve or the answer takes longer than RESOLVE_TIMEOUT_S."""
        self.thread.join(RESOLVE_TIMEOUT_S)
        if self.thread.is_alive():
            note("this machine's name {!r} did not resolve within {:g} s".format(self.hostname, RESOLVE_TIMEOUT_S))
        return self.found


def free_ports(first, last):
    """Up to FREE_PORTS_COUNT ports that can be bound now, on all addresses.

    The search begins at a place that differs from process to process: two runs prepared at once get different ports.
    """
    count = last - first + 1
    free = []
    for step in range(count):
        port = first + (os.getpid() + step) % count
        if is_free(port):
            free.append(port)
            if len(free) == FREE_PORTS_COUNT:
                return free
    note("only {} free TCP ports between {} and {}".format(len(free), first, last))
    return free


def is_free(port):
    """Whether the port can be bound with IPv4 and, where the kernel has it, with IPv6 (which includes IPv4)."""
    for family, anywhere in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as listener:
                listener.bind((anywhere, port))
        except OSError as error:
            if family == socket.AF_INET or error.errno == errno.EADDRINUSE:
                return False
    return True


def note(text):
    sys.stderr.write("probe: {}\n".format(text))
