"""`jaxmpi top`: the ranks of this user's running jobs, live.

`observe` collects a `Look` per rank. `rows` computes rates and a verdict per rank from the looks of
a job. `as_table`, `as_json` and `as_prometheus` show the rows.
"""

import argparse
import contextlib
import json
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, NamedTuple

from jaxmpi._job.process.live_record import Event
from jaxmpi._job.tools.observe import Local, Look, Remote, print_looks

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["Row", "Watcher", "as_json", "as_prometheus", "as_table", "rows", "run"]

# `--json` waits this long for the other hosts' first answers.
FIRST_ANSWER_SECONDS = 20.0

# A rank is slow if it is last to more than this share of the collectives, and the other ranks wait
# for more than this share of the time; not judged by fewer collectives.
SLOW_LAST_SHARE, SLOW_WAITED_SHARE, MIN_COMMON_EVENTS = 0.6, 0.1, 10
# A rank is missing if others have waited this long for it, and this many times its usual step.
MISSING_SECONDS, MISSING_STEPS = 1.0, 5.0
SILENT_RECORD_SECONDS = 2.0  # a rank that has written no record for so long is silent
IDLE_SECONDS = 1.0  # a rank that has begun no step for so long makes none


def run(arguments: Sequence[str]) -> int:
    """Show the ranks until interrupted; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="jaxmpi top",
        description="Show the ranks of your running jobs: a line for each, and which is slow, "
        "stopped or missing. It reads what ranks record anyway, and asks them nothing.",
    )
    parser.add_argument("--json", action="store_true", help="print everything once, as JSON")
    parser.add_argument(
        "--every",
        type=float,
        default=0.5,
        metavar="SECONDS",
        help="between two looks; default: 0.5",
    )
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        help="a host where ranks run, if none run here; again for more",
    )
    parser.add_argument(
        "--agent", default="ssh", metavar="COMMAND", help="what reaches other hosts; default: ssh"
    )
    parser.add_argument(
        "--prometheus", type=int, metavar="PORT", help="serve http://127.0.0.1:PORT/metrics instead"
    )
    # `Remote` starts this on another host.
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not 0.1 <= options.every <= 3600:
        parser.error(f"--every is {options.every}. Give a number of seconds from 0.1 to 3600.")
    if options.here:
        print_looks(options.every)
        return 0
    with (
        contextlib.closing(Watcher(options.host, options.agent, options.every)) as watcher,
        contextlib.suppress(KeyboardInterrupt),
    ):
        if options.json:
            sys.stdout.write(as_json(*watcher.wait(FIRST_ANSWER_SECONDS)) + "\n")
            return 0
        if options.prometheus is not None:
            return _serve_prometheus(watcher, options.prometheus)
        return _show(watcher, options.every)
    return 0


class Watcher:
    """The ranks of this host, and of the hosts that they name as those of their jobs."""

    def __init__(self, hosts: Sequence[str], agent: str, every_seconds: float) -> None:
        self._local, self._agent, self._every = Local(), agent, every_seconds
        self._remote = {host: Remote(host, agent, every_seconds) for host in hosts}
        self._lock = threading.Lock()  # Prometheus's requests come in several threads

    def look(self) -> tuple[list["Row"], dict[str, str]]:
        """Return the rows now, and the errors of other hosts."""
        with self._lock:
            looks = self._local.look()
            for remote in self._remote.values():
                looks = looks + remote.look()
            # Ranks name all hosts of their job. Start an agent for those that nobody reads yet.
            seen = {os.uname().nodename, *self._remote, *(look["host"] for look in looks)}
            for look in looks:
                for host in look["hosts"]:
                    if host not in seen:
                        seen.add(host)
                        self._remote[host] = Remote(host, self._agent, self._every)
            # Two names of one host show its ranks twice.
            unique = {(look["job"], look["rank"]): look for look in looks}
            errors = {host: remote.error for host, remote in self._remote.items() if remote.error}
            return rows(unique.values()), errors

    def wait(self, timeout_seconds: float) -> tuple[list["Row"], dict[str, str]]:
        """Look until every rank of each job has been seen, or a host has answered with an error."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            found, errors = self.look()
            counts = Counter(row.job for row in found)
            complete = all(counts[row.job] == row.size for row in found)
            if complete and (found or not self._remote):
                return found, errors
            if errors or time.monotonic() > deadline:
                return found, errors
            time.sleep(0.1)

    def close(self) -> None:
        """End what was started on other hosts."""
        for remote in self._remote.values():
            remote.close()


def _show(watcher: Watcher, every_seconds: float) -> int:
    try:
        from rich.live import Live
    except ImportError:
        sys.stderr.write(
            "jaxmpi top: the live view needs rich. Install it with `pip install rich`, or use "
            "--json.\n"
        )
        return 2
    with Live(as_table(*watcher.look()), auto_refresh=False, screen=sys.stdout.isatty()) as live:
        while True:
            time.sleep(every_seconds)
            live.update(as_table(*watcher.look()), refresh=True)


def _serve_prometheus(watcher: Watcher, port: int) -> int:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answer with the rows of now."""
            body = as_prometheus(watcher.look()[0]).encode() if self.path == "/metrics" else b""
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing for a request."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        sys.stderr.write(
            f"jaxmpi top: port {port} cannot be used ({error}). Give --prometheus another one.\n"
        )
        return 2
    with server:
        sys.stderr.write(f"jaxmpi top: http://127.0.0.1:{server.server_port}/metrics\n")
        server.serve_forever()
    return 0


# from looks to rows


class Row(NamedTuple):
    """One rank, as it is shown."""

    job: str
    rank: int
    size: int
    host: str
    pid: int
    steps_per_second: float | None  # how often its largest message recurs
    samples_per_second: float | None  # that `Throughput` counts
    communication: float | None  # share of the time for which it waits for collectives
    last: float | None  # share of the collectives to which it came last
    memory_bytes: int
    gpu_bytes: int | None
    verdict: str  # "", "slow", "busy", "missing", "stopped" or "silent"
    missing_seconds: float | None  # how long others have waited for a missing rank
    doing: str  # in or after the last collective

    @property
    def verdict_text(self) -> str:
        """The verdict as it is shown, such as "missing for 3 s"."""
        if self.missing_seconds is None:
            return self.verdict
        return f"{self.verdict} for {self.missing_seconds:.0f} s"

    @property
    def stalls_others(self) -> bool:
        """True if other ranks have to wait for this one now."""
        return self.verdict in ("missing", "stopped", "silent")


def rows(looks: Iterable[Look]) -> list[Row]:
    """Return a row for each rank, by job and rank."""
    jobs: dict[str, list[Look]] = defaultdict(list)
    for look in looks:
        jobs[look["job"]].append(look)
    found = []
    for _, job in sorted(jobs.items()):
        found += _job_rows(sorted(job, key=lambda look: look["rank"]))
    return found


def _job_rows(looks: Sequence[Look]) -> list[Row]:
    last_shares = _last_shares(looks)
    waited = _waited_for(looks)
    found = []
    for look in looks:
        steps_per_second, step_seconds = _steps(look)
        last_share = last_shares.get(look["rank"])
        missing_seconds = None
        # In this order: a stopped process writes no records, and a busy rank may hold the GIL.
        if look["state"] == "stopped":
            verdict = "stopped"
        elif look["busy"]:
            verdict = "busy"
        elif _is_silent(look):
            verdict = "silent"  # its Python does not run
        elif waited.get(look["rank"], 0.0) > max(
            MISSING_SECONDS, MISSING_STEPS * (step_seconds or 0)
        ):
            verdict, missing_seconds = "missing", waited[look["rank"]]
        elif (
            last_share is not None
            and last_share > SLOW_LAST_SHARE
            and _waited_share(looks, look["rank"]) > SLOW_WAITED_SHARE
        ):
            verdict = "slow"
        else:
            verdict = ""
        found.append(
            Row(
                job=look["job"],
                rank=look["rank"],
                size=look["size"],
                host=look["host"],
                pid=look["pid"],
                steps_per_second=steps_per_second,
                samples_per_second=look["samples_per_second"],
                communication=_communication(look),
                last=last_share,
                memory_bytes=look["memory_bytes"],
                gpu_bytes=look["gpu_bytes"],
                verdict=verdict,
                missing_seconds=missing_seconds,
                doing=look["doing"],
            )
        )
    return found


def _waited_for(looks: Sequence[Look]) -> dict[int, float]:
    """Return the ranks that others wait for, with the seconds for which they have.

    Where a rank says for whom it waits, it is those that do not wait themselves, and those that
    wait for each other, in different collectives. Where none can say it, it is the ranks that are
    not in the latest collective that a rank is in: then the numbers of the collectives are those of
    all ranks.
    """
    lively = [look for look in looks if look["state"] != "stopped" and not _is_silent(look)]
    says = {look["rank"]: look.get("waits_for") for look in lively}
    if any(says.values()) or None not in says.values():
        waited: dict[int, float] = {}
        for look in lively:
            for rank in says[look["rank"]] or ():
                seconds = _seconds_since(look, look["since_ns"])
                waited[rank] = max(waited.get(rank, 0.0), seconds)
        # [] of a rank that does not wait; None of one that does not know for whom it waits
        idle = {rank for rank in waited if says.get(rank, []) == []}
        explained = idle | {rank for rank, awaited in says.items() if awaited is None}
        for _ in says:  # the longest chain of ranks that wait for each other
            explained |= {
                r for r, awaited in says.items() if not explained.isdisjoint(awaited or ())
            }
        return {r: seconds for r, seconds in waited.items() if r in idle or r not in explained}
    front = max(_position(look) for look in looks)
    waits = [
        _seconds_since(look, look["since_ns"])
        for look in looks
        if look["inside"] and _position(look) == front
    ]
    late = [look["rank"] for look in looks if _position(look) < front]
    return dict.fromkeys(late, min(waits, default=0.0))


def _is_silent(look: Look) -> bool:
    return _seconds_since(look, look["written_ns"]) > SILENT_RECORD_SECONDS


def _position(look: Look) -> int:
    """Return the number of the collective that a rank is in, or of the one before its last.

    A rank that has left its last collective does not wait in it, and it may have left it before the
    others did, as the root of a broadcast.
    """
    return look["entered"] if look["inside"] else look["entered"] - 1


def _seconds_since(look: Look, ns: int) -> float:
    return (look["now_ns"] - ns) / 1e9


def _steps(look: Look) -> tuple[float | None, float | None]:
    """Return steps per second and the seconds of a step; None where they are not known.

    A step is one message of the kind with the most bytes: in training, the gradients.
    """
    if not look["events"]:
        return None, None
    sent: Counter[int] = Counter()  # by fingerprint
    for _, fingerprint, bytes_, *_ in look["events"]:
        sent[fingerprint] += bytes_ + 1  # so that messages without bytes count, too
    largest, _ = sent.most_common(1)[0]
    starts = [start for _, fingerprint, _, start, _, _ in look["events"] if fingerprint == largest]
    if len(starts) < 3:
        return None, None
    step_seconds = (starts[-1] - starts[0]) / (len(starts) - 1) / 1e9
    if _seconds_since(look, starts[-1]) > max(IDLE_SECONDS, MISSING_STEPS * step_seconds):
        return 0.0, step_seconds
    return 1 / max(step_seconds, 1e-9), step_seconds


def _communication(look: Look) -> float | None:
    """Return the share of the time in which the rank waits for collectives.

    The transport counts it. Where there is no earlier look, it follows from the events on record:
    from entering to done.
    """
    if look["waits"] is not None:
        return look["waits"]
    events, now = look["events"], look["now_ns"]
    if not events:
        return None
    inside = sum((done or now) - entered for _, _, _, entered, _, done in events)
    first_entered = events[0][3]
    return min(1.0, inside / max(1, now - first_entered))


def _last_shares(looks: Sequence[Look]) -> dict[int, float]:
    """Return, by rank, the share of the collectives to which it came last.

    The last rank is the one that waited least, since the clocks of two hosts cannot be compared.
    Counted are the collectives that all ranks have on record, under the same number and with the
    same fingerprint; nothing where they are few, or a rank is not seen.
    """
    if len(looks) != looks[0]["size"]:
        return {}
    waits: list[dict[tuple[int, int], int]] = []
    for look in looks:
        own = {}
        for number, fingerprint, _, entered, all_entered, _ in look["events"]:
            if all_entered:
                own[number, fingerprint] = all_entered - entered
        waits.append(own)
    common = set.intersection(*map(set, waits))
    if len(common) < MIN_COMMON_EVENTS:
        return {}
    counts = Counter(min(range(len(looks)), key=lambda i: waits[i][event]) for event in common)
    return {look["rank"]: counts[i] / len(common) for i, look in enumerate(looks)}


def _waited_share(looks: Sequence[Look], rank: int) -> float:
    """Return the mean share of the time in which the ranks other than `rank` wait for a rank."""
    others = [look for look in looks if look["rank"] != rank]
    shares = [_event_waits(look["events"]) for look in others]
    return sum(shares) / max(1, len(shares))


def _event_waits(events: Sequence[Event]) -> float:
    """Return the share of the time of these collectives until the last rank had entered them."""
    complete = [event for event in events if event[4] and event[5]]
    if not complete:
        return 0.0
    span = complete[-1][5] - complete[0][3]
    waited = sum(all_entered - entered for _, _, _, entered, all_entered, _ in complete)
    return waited / span if span else 0.0


# from rows to text

COLUMNS = ("rank", "host", "steps/s", "samples/s", "comm", "last", "GB", "GPU GB", "", "collective")
LEFT_COLUMNS = ("rank", "host", "", "collective")  # whose text begins at the left
COLORS = {"slow": "yellow", "busy": "cyan", "": "none"}
METRICS = {
    "steps_per_second": "How often the largest message of the rank recurs.",
    "samples_per_second": "Samples that jaxmpi.Throughput has counted.",
    "communication": "Share of the time in which the rank waits for collectives, and so for ranks.",
    "last": "Share of the collectives to which the rank came last.",
    "memory_bytes": "Resident memory.",
    "gpu_bytes": "Memory of GPUs.",
}


def as_table(rows: Sequence[Row], errors: Mapping[str, str]) -> "Group":
    """Return tables of rich: one per job, a line per rank; then the errors of other hosts."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Table | Text] = []
    for job in dict.fromkeys(row.job for row in rows):
        ranks = [row for row in rows if row.job == job]
        table = Table(
            title=f"job {job}, {len(ranks)} of {ranks[0].size} ranks",
            title_justify="left",
            expand=True,
        )
        for name in COLUMNS:
            table.add_column(
                name,
                justify="left" if name in LEFT_COLUMNS else "right",
                no_wrap=True,
                overflow="ellipsis",
                ratio=1 if name == "collective" else None,  # it gets what the others leave
            )
        for row in ranks:
            table.add_row(*map(Text, _cells(row)), style=COLORS.get(row.verdict, "bold red"))
        parts.append(table)
    if not rows:
        parts.append(Text("no job of several ranks of yours runs here"))
    for host, error in errors.items():
        parts.append(Text(f"{host}: {error}", style="red"))
    return Group(*parts)


def _cells(row: Row) -> list[str]:
    return [
        str(row.rank),
        row.host,
        _number(row.steps_per_second, ".4g"),
        _number(row.samples_per_second, ".4g"),
        _number(row.communication, ".0%"),
        _number(row.last, ".0%"),
        _number(row.memory_bytes / 1e9, ".2f"),
        _number(None if row.gpu_bytes is None else row.gpu_bytes / 1e9, ".2f"),
        row.verdict_text,
        row.doing,
    ]


def _number(x: float | None, layout: str) -> str:
    return "-" if x is None else format(x, layout)


def as_json(rows: Iterable[Row], errors: Mapping[str, str]) -> str:
    """Return one JSON object: the ranks, and the errors of other hosts."""
    ranks = [{**row._asdict(), "verdict": row.verdict_text} for row in rows]
    return json.dumps({"ranks": ranks, "errors": dict(errors)}, indent=1)


def as_prometheus(rows: Sequence[Row]) -> str:
    """Return Prometheus's text format, version 0.0.4."""
    lines = []
    for name, meaning in METRICS.items():
        lines += [f"# HELP jaxmpi_{name} {meaning}", f"# TYPE jaxmpi_{name} gauge"]
        for row in rows:
            value = getattr(row, name)
            if value is not None:
                lines.append(f"jaxmpi_{name}{_labels(row)} {value:.9g}")
    lines.append("# HELP jaxmpi_stalled 1 where other ranks wait for this one.")
    lines.append("# TYPE jaxmpi_stalled gauge")
    for row in rows:
        lines.append(f"jaxmpi_stalled{_labels(row)} {1 if row.stalls_others else 0}")
    return "\n".join(lines) + "\n"


def _labels(row: Row) -> str:
    return f'{{job="{_quoted(row.job)}",rank="{row.rank}",host="{_quoted(row.host)}"}}'


def _quoted(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
