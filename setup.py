"""Carries ``conf/`` into the wheel as ``refragkit/conf``, where the installed console script looks for it."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfiguration(build_py):
    """Copies the YAML groups after the Python files."""

    def run(self) -> None:
        """Build, then copy; an editable install reads the checkout's own ``conf/``."""
        super().run()
        if not self.editable_mode:
            source = Path(__file__).parent / "conf"
            shutil.copytree(source, Path(self.build_lib) / "refragkit" / "conf", dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithConfiguration})
