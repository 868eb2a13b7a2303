"""`bubblescope run` puts this file's folder on PYTHONPATH, so every Python that the job starts runs it at its start.

It hands over to the `sitecustomize` that would have run without us, and then prepares recording. Nothing here may
raise, and nothing heavy may be imported: most of these processes never train.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _run_the_one_behind() -> None:
    """The user's or the distribution's own sitecustomize, which this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 (pathlib costs a millisecond)
    behind = [folder for folder in sys.path if os.path.abspath(folder or ".") != here]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", behind)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _find_bubblescope() -> None:
    """Where the job's Python has no bubblescope installed, the one that launched the job serves."""
    if importlib.util.find_spec("bubblescope") is not None:
        return
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
    spec = importlib.util.spec_from_file_location(
        "bubblescope",
        os.path.join(package, "__init__.py"),  # noqa: PTH118
        submodule_search_locations=[package],
    )
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["bubblescope"] = module
        spec.loader.exec_module(module)


def _prepare() -> None:
    if os.environ.get("BUBBLESCOPE", "off") in ("", "off"):
        return
    try:
        _find_bubblescope()
        from bubblescope.attach import sitehook

        sitehook.install()
    except Exception as error:  # the job must start as it would without us
        print(f"bubblescope: nothing is recorded: {type(error).__name__}: {error}", file=sys.stderr)


_prepare()
_run_the_one_behind()
