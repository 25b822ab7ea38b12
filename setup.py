"""The C kernel, which pyproject.toml cannot say without a warning; all else is there."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        # Plain C without Python in it, loaded with ctypes. Where it cannot be built, the torch reference gives the same
        # bits.
        Extension(
            "penstock.update._host_kernel",
            sources=["src/penstock/update/host_kernel.c", "src/penstock/update/host_pool.c"],
            extra_compile_args=["-O3", "-ffp-contract=off", "-fno-math-errno"],
            libraries=["m", "pthread"],
            optional=True,
        )
    ]
)
