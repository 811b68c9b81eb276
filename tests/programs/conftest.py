"""Every program runs on every strategy."""

from tests.contract.conftest import target as target
