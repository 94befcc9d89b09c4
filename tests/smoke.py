"""Check an installed jaxmpi in an otherwise empty environment; packaging/package.sh runs it in two.

empty/bin/python tests/smoke.py
"""

import subprocess
import sys
from importlib import import_module, metadata, resources
from pathlib import Path

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart.py"


def main():
    import jaxmpi

    assert Path(jaxmpi.__file__).is_relative_to(sys.prefix), (
        f"{jaxmpi.__file__} is not the installed one"
    )
    assert metadata.version("jaxmpi") == jaxmpi.__version__
    assert resources.files("jaxmpi").joinpath("py.typed").is_file()
    import_module("jaxmpi._native")

    def run(*command):
        command = [sys.executable, *map(str, command)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    done = run(QUICKSTART)
    assert "loss after 100 epochs: 7.37" in done.stdout, done.stdout + done.stderr
    done = run("-m", "jaxmpi", "doctor")
    assert done.returncode == 1 and "mpi4py is not installed" in done.stdout, (
        done.stdout + done.stderr
    )
    done = run("-m", "jaxmpi", "run", "-n", "2", QUICKSTART)
    assert done.returncode and "Traceback" not in done.stderr, done.stdout + done.stderr
    print(
        f"jaxmpi {jaxmpi.__version__} works, installed from "
        f"{metadata.distribution('jaxmpi').read_text('direct_url.json')}"
    )


if __name__ == "__main__":
    main()
