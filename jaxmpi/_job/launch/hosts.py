"""Which hosts MPI's options name, and how many ranks a node gets, as far as these and the batch system tell."""

import contextlib
import re
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["named_hosts", "on_other_nodes", "ranks_of_a_node", "same_host", "with_hosts"]

_EACH = "--?(N|npernode|ppn|perhost)(=.*)?$"
_HOSTS = "--?(host|H|hosts)(=.*)?$"
_FILES = "--?((default-)?hostfile|machinefile|f)(=.*)?$"


def on_other_nodes(options: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether ranks may run elsewhere: MPI's options name hosts, or the batch system has given us several."""
    return bool(_value(options, _HOSTS) or _value(options, _FILES)) or len(_allocated(environ)) > 1


def ranks_of_a_node(ranks: int, options: Sequence[str], environ: Mapping[str, str]) -> int | None:
    """How many of the ranks are on the node that has most; None where hosts are named and not how many each takes."""
    if each := re.search(r"\d+", _value(options, _EACH)):
        return min(ranks, int(each[0]))
    if hosts := _value(options, _HOSTS):
        places = [*_places(hosts.split(",")).values()]
    elif (path := _value(options, _FILES)) and path != environ.get("PBS_NODEFILE"):
        places = [*_from_file(path).values()]
        if not places:
            return None
    else:
        places = _allocated(environ)
    return min(ranks, max(places) * -(-ranks // sum(places))) if sum(places) else ranks


def named_hosts(options: Sequence[str]) -> dict[str, int]:
    """The hosts that the options name, or the file that they name, read now, with their places; empty where one is open."""
    if hosts := _value(options, _HOSTS):
        return _places(hosts.split(","))
    path = _value(options, _FILES)
    return _from_file(path) if path else {}


def with_hosts(options: Sequence[str], hosts: Mapping[str, int], folder: Path) -> tuple[str, ...]:
    """The options with these hosts in the place of those that they name: a list, or a file in this folder."""
    listed = ",".join(f"{name}:{places}" for name, places in hosts.items())
    changed: list[str] = []
    for option in options:
        before = changed[-1] if changed else ""
        for names in (_HOSTS, _FILES):
            name, equals, _ = option.partition("=")
            if re.match(names, before) and "=" not in before:
                option = listed if names == _HOSTS else _file_like(option, hosts, folder)
            elif equals and re.match(names, option):
                option = f"{name}={listed if names == _HOSTS else _file_like(option[len(name) + 1 :], hosts, folder)}"
        changed.append(option)
    return tuple(changed)


def same_host(one: str, other: str) -> bool:
    """Whether two names are of one host: equal, equal up to the domain, or with an address in common."""
    labels = [name.partition(".")[0] for name in (one, other)]
    if one == other or (labels[0] == labels[1] and not labels[0].isdigit()):
        return True
    return bool(_addresses(one) & _addresses(other))


def _file_like(path: str, hosts: Mapping[str, int], folder: Path) -> str:
    """A file of these hosts, in the words of another one."""
    word = " slots=" if "slots=" in Path(path).read_text() else ":"
    file = folder / "hosts"
    file.write_text("".join(f"{name}{word}{places}\n" for name, places in hosts.items()))
    return str(file)


def _value(options: Sequence[str], names: str) -> str:
    """What follows the first of these options, or its equals sign."""
    for option, following in zip(options, [*options[1:], ""], strict=False):
        if re.match(names, option):
            return option.partition("=")[2] or following
    return ""


def _allocated(environ: Mapping[str, str]) -> list[int]:
    """Places on each of the batch system's nodes; empty without one."""
    with contextlib.suppress(KeyError, OSError):
        return [*_places(Path(environ["PBS_NODEFILE"]).read_text().split()).values()]
    # such as "4(x2),3"
    nodes = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_TASKS_PER_NODE", ""))
    return [int(ranks) for ranks, times in nodes for _ in range(int(times or 1))]


def _from_file(path: str) -> dict[str, int]:
    """Places on each node of a file of hosts: "node1 slots=4", "node1:4" or several times "node1"; empty where one is open."""
    try:
        lines = [line.partition("#")[0].strip() for line in Path(path).read_text().splitlines()]
    except OSError:
        return {}
    hosts = [re.sub(r"\s+(.*\s)?slots=(\d+).*", r":\2", line).split()[0] for line in lines if line]
    return _places(hosts) if all(":" in host or hosts.count(host) > 1 for host in hosts) else {}


def _places(hosts: Sequence[str]) -> dict[str, int]:
    """Places of hosts such as "node1:4"; one for each time that a host is named without."""
    counts: Counter[str] = Counter()
    for host in hosts:
        name, _, number = host.partition(":")
        counts[name] += int(number) if number.isdigit() else 1
    return dict(counts)


def _addresses(name: str) -> set[str]:
    with contextlib.suppress(OSError, UnicodeError):
        return {str(found[4][0]) for found in socket.getaddrinfo(name, None)}
    return set()
