# Takes the place of modules that published code imports and does not use here.
import importlib.abc
import importlib.machinery
import sys
import types


class Type(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class Anything(metaclass=Type):
    """Takes the place of what is imported and not used."""

    def __init__(self, *args, **named):
        pass

    def __getattr__(self, name):
        return Anything()

    def __call__(self, *args, **named):
        return Anything()

    def __or__(self, other):
        return object

    def __ror__(self, other):
        return object

    def __getitem__(self, key):
        return Anything()

    def __mro_entries__(self, bases):
        return ()


class Unused(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, Type(name, (Anything,), {}))  # types are compared
        return getattr(self, name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, unused):
        self.unused = unused

    def find_spec(self, name, path, target=None):
        if any(name == u or name.startswith(u + ".") for u in self.unused):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Unused(spec.name)

    def exec_module(self, module):
        pass


def replace(*unused):
    """Replaces modules, and all in them."""
    sys.meta_path.insert(0, Finder(unused))
