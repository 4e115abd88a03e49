"""What ``recovery init`` would change on this machine, shown before it is changed.

    changes = plan(site, Path("/"))
    for change in changes:
        print(change.shown())
    apply(changes)

Below ``root``, which is another folder than ``/`` where an image is being made. What is as it
should be already is no change, so that a second run finds nothing to do. recovery.toml is the
admin's own: one that is there is never touched.
"""

from __future__ import annotations

import difflib
import os
import pwd
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from recovery.site import texts
from recovery.site.texts import Site
from slurm_hooks import spool
from slurm_hooks.config import load

UNIT = Path("etc/systemd/system/slurm-recovery.service")
LOGROTATE = Path("etc/logrotate.d/slurm-recovery")
STATE_MODE = 0o750

_READ_LIMIT_BYTES = 1 << 20

_ODD = re.compile(r"""[\s%$"'\\#\x00-\x1f]""")


class InstallError(Exception):
    """Something is in the way; the text says what, and what to do."""


@dataclass(frozen=True)
class Change:
    """One thing that is not yet as it should be: ``before`` and ``after`` are its text."""

    path: Path
    before: str
    after: str
    make: Callable[[], None]

    def shown(self) -> str:
        """Return the change as a unified diff."""
        old, new = self.before.splitlines(), self.after.splitlines()
        source = str(self.path) if old else "/dev/null"
        return "\n".join(difflib.unified_diff(old, new, source, str(self.path), lineterm=""))


def plan(site: Site, root: Path) -> list[Change]:
    """Return what has to change for the controller ``site`` below ``root``, in order.

    Raises:
        InstallError: a path is taken by something else or cannot stand in a unit, or recovery.toml
            says other places.
        ConfigError: recovery.toml is there and cannot be read.
    """
    _insist_on_plain_paths(site)
    changes = [
        _config(site, root),
        *_spool(site, root),
        _folder(_below(root, site.state), STATE_MODE, site.uid),
        *_hooks(site, root),
        _text(root / UNIT, texts.unit(site)),
        _text(root / LOGROTATE, texts.logrotate()),
    ]
    return [change for change in changes if change is not None]


def plan_node(site: Site, root: Path) -> list[Change]:
    """Return what has to change for a compute node: the hooks, and recovery.toml if it lacks."""
    _insist_on_plain_paths(site)
    changes = [_config(site, root), *_hooks(site, root)]
    return [change for change in changes if change is not None]


def apply(changes: Sequence[Change]) -> None:
    """Make the changes.

    Raises:
        InstallError: one of them cannot be made; those before it are.
    """
    mend = "; run this as root" if os.geteuid() else ""
    for change in changes:
        try:
            change.make()
        except OSError as error:
            says = f"{error.filename or change.path}: {error.strerror}"
            raise InstallError(f"{says}{mend}") from error
        except spool.SpoolError as error:
            raise InstallError(f"{error}{mend}") from error


def _insist_on_plain_paths(site: Site) -> None:
    """systemd and slurm.conf take a space for the next value, and systemd ``%`` for a specifier."""
    for path in (site.spool, site.state, site.hooks, site.python, site.config):
        if odd := _ODD.search(str(path)):
            says = f"{str(path)!r}: neither a unit nor slurm.conf can name a path with {odd[0]!r}"
            raise InstallError(f"{says}: choose another")


def _below(root: Path, path: Path) -> Path:
    return root / path.relative_to(path.anchor)


def _config(site: Site, root: Path) -> Change | None:
    path = _below(root, site.config)
    if not os.path.lexists(path):
        return _text(path, texts.recovery_toml(site))
    found = load(path)
    says = {
        "spool.path": (found.spool.path, site.spool),
        "spool.authenticate": (found.spool.authenticate, site.authenticate),
        "controller.state": (found.controller.state, site.state),
        "controller.cluster": (found.controller.cluster, site.cluster),
    }
    for key, (there, wanted) in says.items():
        if there != wanted:
            raise InstallError(
                f"{path} is yours and says {key} = {str(there)!r}, not {str(wanted)!r}:"
                " change it there, or leave the option out"
            )
    missing = set(site.trusted_uids) - set(found.spool.trusted_uids)
    if missing:
        raise InstallError(f"{path} is yours: add uid {min(missing)} to spool.trusted_uids there")
    return None


def _spool(site: Site, root: Path) -> list[Change | None]:
    base = _below(root, site.spool)
    folders = [(base, 0o755), *((base / name, mode) for name, mode in spool.FOLDERS.items())]
    theirs: set[Path] = set()
    if site.authenticate == "munge":  # who may write there proves nothing, and is for the admin
        theirs = {base / name for name in spool.OF_NODES if (base / name).is_dir()}
    return [_folder(path, mode, site.uid) for path, mode in folders if path not in theirs]


def _folder(path: Path, mode: int, uid: int) -> Change | None:
    wanted = f"folder, mode {mode:04o}, uid {uid}"
    try:
        found = path.lstat()
    except FileNotFoundError:
        before = ""
    else:
        if not stat.S_ISDIR(found.st_mode):
            raise InstallError(f"{path} is there and is no folder: move it away, or name another")
        before = f"folder, mode {stat.S_IMODE(found.st_mode):04o}, uid {found.st_uid}"
    if before == wanted:
        return None

    def make() -> None:
        try:
            set_up()
        except PermissionError:
            if os.geteuid() or not uid:
                raise
            # An export with root_squash: whom the folder is for may do there what root may not.
            if not before and path.is_dir():
                path.rmdir()  # made as nobody's
            account = pwd.getpwuid(uid)
            os.setegid(account.pw_gid)
            os.seteuid(uid)
            try:
                set_up()
            finally:
                os.seteuid(0)
                os.setegid(0)

    def set_up() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.mkdir()
        # Never through a link that somebody has put there meanwhile.
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_uid != uid:
                os.fchown(descriptor, uid, -1)
            os.fchmod(descriptor, mode)
        finally:
            os.close(descriptor)

    return Change(path, before, wanted, make)


def _hooks(site: Site, root: Path) -> list[Change | None]:
    return [
        _text(_below(root, site.hooks / name), texts.hook(site, name), is_hook=True)
        for name in texts.HOOKS.values()
    ]


def _text(path: Path, text: str, *, is_hook: bool = False) -> Change | None:
    """Return the change that makes a file of ``text``.

    The file is replaced by a rename: slurmd never finds a hook absent, which it takes for a failed
    one. Earlier versions made the hooks links; any other link is somebody's (systemd's own masks a
    unit) and is in the way.
    """
    mode = 0o755 if is_hook else 0o644
    before = ""
    if is_hook and path.is_symlink():
        before = f"link to {path.readlink()}"
    elif os.path.lexists(path):
        try:
            before = spool.read_regular(path, _READ_LIMIT_BYTES).decode("utf-8", "replace")
        except spool.SpoolError as error:
            raise InstallError(f"{error}: move it away") from error
        if before == text and mode & ~stat.S_IMODE(path.stat().st_mode):
            before = f"mode {stat.S_IMODE(path.stat().st_mode):04o}"
    if before == text:
        return None

    def make() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        spool.write(path.parent, path.name, text.encode(), mode=mode)

    return Change(path, before, text, make)
