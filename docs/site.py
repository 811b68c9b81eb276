"""What the site needs of Python: a hook of MkDocs, and an extension of mkdocstrings."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator

import griffe

__all__ = ["PublicNames", "on_page_content"]

#: Longer ones, such as the path of a module, would make a table wider than its page.
_WORD = re.compile(r"<code>([^\s<]{1,32})</code>")
#: Packages whose names are imported when they are first used, which their source does not show.
_PACKAGES = ("estimator", "exporting", "horovod")


def on_page_content(html: str, **_: object) -> str:
    """Gives flags, keys and names in the text of a page the class `word`; see site.css."""
    return _WORD.sub(r'<code class="word">\1</code>', html)


class PublicNames(griffe.Extension):
    """Gives packages the names that they offer, each from the module that defines it."""

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        """Adds the names to those of `tfdist`, once it has been read."""
        for package in _PACKAGES if pkg.name == "tfdist" else ():
            public = set(importlib.import_module(f"tfdist.{package}").__all__)
            for module in _modules(pkg[package]):
                for name in public & set(map(str, module.exports or ())):
                    pkg[package].set_member(name, griffe.Alias(name, module[name]))


def _modules(package: griffe.Module) -> Iterator[griffe.Module]:
    """The modules within a package, also of its packages."""
    for module in list(package.modules.values()):
        yield module
        yield from _modules(module)
