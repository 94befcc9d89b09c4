"""`jaxmpi top`: the ranks of running jobs of this user, live."""

import argparse
import contextlib
import json
import os
import select
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from jaxmpi._job.tools.observe import Here, Remote
from jaxmpi._job.tools.rank_rates import Row, rows
from jaxmpi._job.tools.top_view import as_json, as_prometheus, as_table

__all__ = ["Watcher", "run"]

REMOTE_SECONDS = 20.0  # for the other hosts' first answer, where it is shown once


def run(arguments: Sequence[str]) -> int:
    """Show the ranks until interrupted; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="jaxmpi top",
        description="Show the ranks of your running jobs: a line for each, and which is slow, stopped or missing. It reads "
        "what ranks record anyway, and asks them nothing.",
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
    # what another host's `jaxmpi top` starts
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not 0.1 <= options.every <= 3600:
        parser.error(f"--every is {options.every}. Give a number of seconds from 0.1 to 3600.")
    if options.here:
        return _serve_lines(options.every)
    with (
        contextlib.closing(Watcher(options.host, options.agent, options.every)) as watcher,
        contextlib.suppress(KeyboardInterrupt),
    ):
        if options.json:
            sys.stdout.write(as_json(*watcher.wait(REMOTE_SECONDS)) + "\n")
            return 0
        if options.prometheus is not None:
            return _serve_prometheus(watcher, options.prometheus)
        return _show(watcher, options.every)
    return 0


class Watcher:
    """The ranks of this host, and of the hosts that they say their jobs run on."""

    def __init__(self, hosts: Sequence[str], agent: str, every_seconds: float) -> None:
        self._here, self._agent, self._every = Here(), agent, every_seconds
        self._remote = {host: Remote(host, agent, every_seconds) for host in hosts}
        self._lock = threading.Lock()

    def look(self) -> tuple[list[Row], dict[str, str]]:
        """The rows now, and the errors of other hosts."""
        with self._lock:
            looks = [
                *self._here.look(),
                *(look for remote in self._remote.values() for look in remote.look()),
            ]
            named = {host for look in looks for host in look["hosts"]} - {os.uname().nodename}
            seen = {look["host"] for look in looks}
            for host in named - seen - set(self._remote):
                self._remote[host] = Remote(host, self._agent, self._every)
            unique = {(look["job"], look["rank"]): look for look in looks}
            return rows(unique.values()), {
                host: remote.error for host, remote in self._remote.items() if remote.error
            }

    def wait(self, timeout_seconds: float) -> tuple[list[Row], dict[str, str]]:
        """As `look`, once every rank of each job has been seen, or its host has answered with an error."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            found, errors = self.look()
            whole = all(sum(row.job == other.job for other in found) == row.size for row in found)
            if (whole and (found or not self._remote)) or errors or time.monotonic() > deadline:
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


def _serve_lines(every_seconds: float) -> int:
    """Print this host's looks, a line of JSON each time, until stdin is closed."""
    here = Here()
    with contextlib.suppress(BrokenPipeError):
        while True:
            sys.stdout.write(json.dumps(here.look()) + "\n")
            sys.stdout.flush()
            if select.select([0], [], [], every_seconds)[0] and not os.read(0, 4096):
                return 0
    return 0


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
            """Say nothing of each request."""

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
