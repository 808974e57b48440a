"""Puts our DataParallel in the place of torch's, for code that cannot be edited."""

import functools
import inspect
import sys
import threading
from abc import ABCMeta
from collections.abc import Iterator
from contextlib import ContextDecorator
from typing import Any, TypeVar

from torch import nn

from pyparallel.data_parallel import DataParallel

T = TypeVar("T", bound=nn.Module)

# In a tuple, so that a patch does not find it here.
_TORCHS: tuple[type[Any]] = (nn.DataParallel,)
_signature = inspect.signature(DataParallel)
_lock = threading.Lock()
_active: list[type[Any]] = []  # stand-ins, the latest last


def patched(**defaults: Any) -> "Patch":
    """Lets code that says ``torch.nn.DataParallel`` have ours, as long as the context lasts.

    ::

        with pyparallel.patched(split="balanced"):
            trainer.train()

    While it is active, every loaded module that holds the class (``torch.nn``,
    ``torch.nn.parallel``, a library that said ``from torch.nn import DataParallel``) holds a
    stand-in. Calling that makes a ``pyparallel.DataParallel``, which stays one afterwards. At the
    end, also after an exception, all modules hold torch's class again, those imported meanwhile
    too.

    ``isinstance(model, torch.nn.DataParallel)`` and ``issubclass`` answer as without the patch, for
    wrappers of both kinds. ``type(model) is torch.nn.DataParallel`` is false for wrappers of both.
    A class that is derived meanwhile derives from ours, with these defaults, and stays so. Not
    reached: classes derived before, references in containers, closures, default arguments and
    attributes of objects, and the function ``torch.nn.parallel.data_parallel``. Wrappers of
    torch's own class cannot be pickled meanwhile; those that are unpickled stay torch's.

    The patch holds for all threads of the process. Patches may be nested: the one entered last
    counts, with its defaults alone. They may end in any order, as they do in several threads.

    The result is also a decorator, and has ``start()`` and ``stop()`` for notebooks, where a
    context cannot last for several cells.

    Args:
        defaults: Arguments of ``pyparallel.DataParallel``, other than ``module``, for calls that
            leave them out or pass None.

    Raises:
        TypeError: ``DataParallel`` has no such argument.
    """
    known = [name for name in _signature.parameters if name != "module"]
    for name in defaults:
        if name not in known:
            raise TypeError(
                f"patched() got an unexpected argument {name!r}; it takes {', '.join(known)}"
            )
    # An iterator would be empty for the second wrapper, which would then pass through.
    return Patch({k: list(v) if isinstance(v, Iterator) else v for k, v in defaults.items()})


class Patch(ContextDecorator):
    """What ``patched`` returns."""

    def __init__(self, defaults: dict[str, Any]) -> None:
        self._defaults = defaults
        self._stand_in: type[Any] | None = None

    def start(self) -> "Patch":
        """Begins, and returns itself. Raises RuntimeError if it is active already."""
        with _lock:
            if self._stand_in is not None:
                raise RuntimeError("this patch is active already; make another with patched()")
            self._stand_in = _make_stand_in(self._defaults)
            _active.append(self._stand_in)
            _exchange(*_TORCHS, *_active)
        return self

    def stop(self) -> None:
        """Ends. Does nothing if it is not active."""
        with _lock:
            if self._stand_in is not None:
                _active.remove(self._stand_in)
                _exchange(*_active, self._stand_in)
                self._stand_in = None

    def __enter__(self) -> "Patch":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _recreate_cm(self) -> "Patch":
        """A decorated function may run in several threads, or call itself."""
        return Patch(self._defaults)


class _StandInType(ABCMeta):
    """Class of the stand-ins; from ABCMeta, so that classes may mix them with abstract ones."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        # Not an object of the stand-in, which could not be pickled.
        if _is_stand_in(cls):
            return DataParallel(**cls._with_defaults(*args, **kwargs))  # type: ignore[attr-defined]
        return super().__call__(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        if _is_stand_in(cls):
            return isinstance(instance, _TORCHS)
        return super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        if _is_stand_in(cls):
            return issubclass(subclass, _TORCHS)
        return super().__subclasscheck__(subclass)


def _is_stand_in(cls: type) -> bool:
    return "_with_defaults" in vars(cls)


def _make_stand_in(defaults: dict[str, Any]) -> type[Any]:
    class StandIn(DataParallel[T], metaclass=_StandInType):
        __doc__ = DataParallel.__doc__
        __signature__ = _signature

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            # Unpickling a wrapper of torch's: the class is looked up by the name that we took.
            return object.__new__(_TORCHS[0] if _is_stand_in(cls) else cls)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if isinstance(self, DataParallel):
                super().__init__(**self._with_defaults(*args, **kwargs))
            else:
                _TORCHS[0].__init__(self, *args, **kwargs)

        @staticmethod
        def _with_defaults(*args: Any, **kwargs: Any) -> dict[str, Any]:
            given = dict(_signature.bind(*args, **kwargs).arguments)
            missing = {k: v for k, v in defaults.items() if given.get(k) is None}
            return {**given, **missing}

    for name in ("__name__", "__qualname__", "__module__"):
        setattr(StandIn, name, getattr(_TORCHS[0], name))
    for name in ("forward", "replicate", "scatter", "parallel_apply", "gather"):
        setattr(StandIn, name, _method(StandIn, name))
    return StandIn


def _method(stand_in: type[Any], name: str) -> Any:
    """Makes a method that is also right for objects of classes that were derived before.

    They may name their base class, as in ``nn.DataParallel.gather(self, ...)``.
    """

    @functools.wraps(getattr(DataParallel, name))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, DataParallel):
            return getattr(super(stand_in, self), name)(*args, **kwargs)
        return getattr(_TORCHS[0], name)(self, *args, **kwargs)

    return method


def _exchange(*old: type[Any]) -> None:
    """Gives every module that holds one of the old classes the one that counts now."""
    new = _active[-1] if _active else _TORCHS[0]
    # By identity: a module may hold anything, and comparing things runs their code.
    old_ids = {id(cls) for cls in old}
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict):
            for name, value in list(names.items()):
                if id(value) in old_ids:
                    names[name] = new
