"""The methods, by the names the paper gives them."""

import importlib
import sys
from importlib.metadata import entry_points

from bace.core.method import Method
from bace.errors import ConfigError, nearest
from bace.methods.agem import AGEM
from bace.methods.bace import BaCE
from bace.methods.beef import BEEF
from bace.methods.bic import BiC
from bace.methods.cfner import CFNER
from bace.methods.clser import CLSER
from bace.methods.co2l import Co2L
from bace.methods.dde import DDE
from bace.methods.derpp import DERpp
from bace.methods.eeil import EEIL
from bace.methods.er import ER
from bace.methods.ewc import EWC
from bace.methods.extendner import ExtendNER
from bace.methods.foster import FOSTER
from bace.methods.gd import GD
from bace.methods.gdumb import GDumb
from bace.methods.hal import HAL
from bace.methods.hat import HAT
from bace.methods.icarl import ICaRL
from bace.methods.idbr import IDBR
from bace.methods.il2m import IL2M
from bace.methods.l2p import L2P
from bace.methods.lucir import LUCIR
from bace.methods.lwf import LwF
from bace.methods.mbpa import MBPA
from bace.methods.mbpapp import MBPApp
from bace.methods.memo import MEMO
from bace.methods.more import MORE
from bace.methods.mtl import MTL
from bace.methods.owm import OWM
from bace.methods.pass_ import PASS
from bace.methods.podnet import PODNet
from bace.methods.row import ROW
from bace.methods.seq import SEQ
from bace.methods.slda import SLDA
from bace.methods.sparseer import SparseER

METHODS: list[type[Method]] = [
    SEQ,
    MTL,
    ER,
    DERpp,
    CLSER,
    HAL,
    GDumb,
    LwF,
    EWC,
    ICaRL,
    LUCIR,
    PODNet,
    DDE,
    EEIL,
    GD,
    Co2L,
    PASS,
    BiC,
    IL2M,
    L2P,
    FOSTER,
    MEMO,
    BEEF,
    HAT,
    AGEM,
    OWM,
    SLDA,
    MORE,
    ROW,
    SparseER,
    MBPA,
    MBPApp,
    IDBR,
    ExtendNER,
    CFNER,
    BaCE,
]


def find_method(name: str) -> type[Method]:
    """A method by its name ("BaCE", in any case; "derpp" for "DER++"), or a user's class by "package.Class".

    Nothing is imported here but installed plug-ins (entry points of the group `bace.methods`), because the name may
    come from a stranger's file. A user's class is found once `import_method`, or the user, has imported it."""
    known = {key: method for method in METHODS for key in (method.title.lower(), method.__name__.lower())}
    if name.lower() in known:
        return known[name.lower()]
    installed = {point.name.lower(): point for point in entry_points(group="bace.methods")}
    if name.lower() in installed:
        return _as_method(name, installed[name.lower()].load())
    module, _, attribute = name.rpartition(".")
    if not module:
        titles = [method.title for method in METHODS]
        raise ConfigError(f"there is no method '{name}'.{nearest(name, [*titles, *installed])}")
    if module not in sys.modules:
        raise ConfigError(
            f"method '{name}' is not part of bace: using it imports the module '{module}' and so runs its code. If you "
            "trust that, add --trust (in Python: trust=True)"
        )
    return _as_method(name, getattr(sys.modules[module], attribute, None))


def import_method(name: str) -> type[Method]:
    """`find_method` with the user's consent to import "package.Class"."""
    module, _, attribute = name.rpartition(".")
    if module:
        try:
            getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"method '{name}' cannot be imported: {error}. Name the folder that holds it in PYTHONPATH"
            ) from error
    return find_method(name)


def _as_method(name: str, found: object) -> type[Method]:
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ConfigError(f"'{name}' is not a bace.Method: a method is a class derived from bace.Method")
    return found
