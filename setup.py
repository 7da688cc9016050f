"""Maps the folders of the clone into one import package, `mlm_repro`. All else is stated in
pyproject.toml."""

from setuptools import find_namespace_packages, setup

ROOMS = ("lineage", "data_pipeline", "engine", "evaluation", "experiments", "verify", "reports")
inner = find_namespace_packages(include=[f"{room}*" for room in ROOMS], exclude=["lineage.package"])
setup(
    package_dir={"mlm_repro": "lineage/package", **{f"mlm_repro.{room}": room for room in ROOMS}},
    packages=["mlm_repro", *(f"mlm_repro.{package}" for package in inner)],
)
