"""tyro for Spack, whose own repository lacks it."""

from spack.package import depends_on, license, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyTyro(PythonPackage):
    """Command lines and configurations from types."""

    homepage = "https://github.com/brentyi/tyro"
    pypi = "tyro/tyro-1.0.17.tar.gz"

    license("MIT")

    version("1.0.17", sha256="484a040f4bebf8374df2e3fa202b10e413f8d1506ca997ba18cd149bb540203e")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-hatchling", type="build")
    depends_on("py-docstring-parser@0.16:", type=("build", "run"))
    depends_on("py-typeguard@4:", type=("build", "run"))
    depends_on("py-typing-extensions@4.13:", type=("build", "run"))
