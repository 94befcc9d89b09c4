"""Write the symbols of MPItrampoline's interface that XLA does not use: mpi_stubs.cc.

    python generate_mpi_stubs.py mpi_symbols.txt mpi_abi.cc mpi_stubs.cc

MPItrampoline ends the process if one of them is missing. A function that `mpi_abi.cc` does not
define says its name and ends the job; a constant has the value that `mpi_abi.cc` gives it, or 0.
"""

import re
import sys
from pathlib import Path


def main(symbols: str, defined: str, out: str) -> None:
    """Write the stubs.

    Args:
      symbols: the table of symbols.
      defined: the source that defines some of them.
      out: the file to write.
    """
    table = re.sub("#.*", "", Path(symbols).read_text()).split()
    source = Path(defined).read_text()
    here = set(re.findall(r"\bMPIABI_\w+", source))
    lines = ['#include "mpi_abi.h"', "", 'extern "C" {']
    for symbol in table:
        name = symbol if symbol.startswith("MPIXABI_") else f"MPIABI_{symbol}"
        if name in here:
            continue
        if re.search("[a-z]", symbol.removeprefix("MPIXABI_")):
            lines.append(f'int {name}() {{ jaxmpi::mpi::refuse("{name[7:]}"); }}')
        else:
            # a line of its own each: MPItrampoline copies as much as its type has
            lines.append(f"jaxmpi::mpi::Constant {name} = {{}};")
    Path(out).write_text("\n".join([*lines, "}", ""]))


if __name__ == "__main__":
    main(*sys.argv[1:])
