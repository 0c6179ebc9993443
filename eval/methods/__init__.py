"""Methods of generating text, by name. A new one is one file and one line here."""

from . import dejavuu, economize, plain, specstate, stock_assisted, stock_prompt_lookup
from .base import Method, MethodResult

METHODS: dict[str, Method] = {
    method.name: method
    for module in (plain, stock_assisted, stock_prompt_lookup, specstate, dejavuu, economize)
    for method in module.METHODS
}

__all__ = ["METHODS", "Method", "MethodResult"]
