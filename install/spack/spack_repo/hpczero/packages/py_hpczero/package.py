"""hpczero for Spack, from a checkout: spack develop --path CHECKOUT py-hpczero@0.1.0 (docs/install.md#spack)."""

from spack.package import depends_on, license, variant, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyHpczero(PythonPackage):
    """ZeRO training of plain PyTorch models on supercomputers, over MPI."""

    license("Apache-2.0")

    version("0.1.0")  # of a checkout: there is no address to fetch it from

    variant("mpio", default=True, description="Write checkpoints through parallel HDF5")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-h5py@3.15:", type=("build", "run"))
    depends_on("py-h5py+mpi", when="+mpio", type=("build", "run"))
    depends_on("py-markdown-it-py@3:", type=("build", "run"))
    depends_on("py-matplotlib@3.9:", type=("build", "run"))
    depends_on("py-mpi4py@4.0.3:", type=("build", "run"))
    depends_on("py-numpy@2.0:", type=("build", "run"))
    depends_on("py-rich@13:", type=("build", "run"))
    depends_on("py-safetensors@0.5:", type=("build", "run"))
    depends_on("py-tensorboard@2.17:", type=("build", "run"))
    depends_on("py-tokenizers@0.21:", type=("build", "run"))
    depends_on("py-tomli@2:", when="^python@:3.10", type=("build", "run"))
    depends_on("py-torch@2.8:", type=("build", "run"))
    depends_on("py-typing-extensions@4.12:", type=("build", "run"))
    depends_on("py-tyro@1.0:", type=("build", "run"))
    depends_on("py-xxhash@3.4:", type=("build", "run"))
