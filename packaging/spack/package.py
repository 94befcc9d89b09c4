"""For a Spack repository: packages/py-jaxmpi/package.py."""

from spack.package import *


class PyJaxmpi(PythonPackage):
    """Data-parallel training for JAX and Flax over MPI.

    Pure functions on pytrees and one optax transform.
    """

    homepage = "https://pypi.org/project/jaxmpi"
    pypi = "jaxmpi/jaxmpi-0.2.0.tar.gz"

    license("MIT")

    version("0.2.0")  # `spack checksum py-jaxmpi` adds its sha256

    depends_on("cxx", type="build")
    depends_on("cmake@3.20:", type="build")
    depends_on("ninja", type="build")
    depends_on("py-scikit-build-core@0.11:", type="build")
    depends_on("py-nanobind@2.4:", type="build")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-jaxlib@0.10:", type=("build", "run"))
    depends_on("py-jax@0.10:", type=("build", "run"))
    depends_on("py-numpy@2:", type=("build", "run"))
    depends_on("py-optax@0.2.5:", type=("build", "run"))
    depends_on("py-flax@0.12:", type=("build", "run"))
    depends_on("py-chex@0.1.90:", type=("build", "run"))
    depends_on("py-tqdm@4.66:", type=("build", "run"))
    depends_on("py-lazy-loader@0.4:", type=("build", "run"))
    depends_on("py-mpi4py@4:", type=("build", "run"))
    depends_on("mpi", type=("build", "run"))
