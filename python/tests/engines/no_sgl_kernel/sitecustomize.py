"""Lets SGLang start on a CPU: on PYTHONPATH, it answers every import of `sgl_kernel`.

The real package is CUDA only. SGLang imports it everywhere and has fallbacks in torch for a CPU. An object of this
package may be named and annotated with; calling it raises RuntimeError.
"""

import importlib.abc
import importlib.machinery
import sys
import types


class _Missing(type):
    def __call__(cls, *_, **__):
        raise RuntimeError(f"sgl_kernel.{cls.__name__} needs a GPU")

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return object()


class _Module(types.ModuleType):
    __version__ = "0.4.10"
    __path__: list[str] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "sgl_kernel":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Finder())
