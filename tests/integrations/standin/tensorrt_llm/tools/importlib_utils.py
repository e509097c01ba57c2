"""tensorrt_llm/tools/importlib_utils.py (1.2 and later): how `--custom_module_dirs` is imported."""

import importlib
import sys
from pathlib import Path


def import_custom_module_from_dir(path):
    """The parent goes on sys.path, and the directory is imported as a package under its own name."""
    path = Path(path)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        return importlib.import_module(path.name)
    except ImportError as error:
        raise ImportError(f"Failed to import package {path.name} from {path}: {error}") from error
