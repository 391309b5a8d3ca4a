"""An endpoint's configuration on its way to the process that is to go by it."""

from __future__ import annotations

import dataclasses
from typing import Any

from transport.cbor import CborValue
from transport.config import EndpointConfig
from transport.protocol.newcomers import NewcomerRules, Rate

__all__ = ["config_of", "map_of"]


def map_of(config: EndpointConfig) -> CborValue:
    """Return `config` as a value that travels."""
    values = dataclasses.asdict(config)
    values["advertise"] = list(config.advertise)
    if config.newcomers is not None:
        for name in ("allow", "deny"):
            values["newcomers"][name] = list(values["newcomers"][name])
    return values


def config_of(values: dict[str, Any]) -> EndpointConfig:
    """Return the configuration that `map_of` was given."""
    values = dict(values, advertise=tuple(values["advertise"]))
    if (rules := values["newcomers"]) is not None:
        rates = {
            name: None if rules[name] is None else Rate(**rules[name])
            for name in ("per_host", "in_all")
        }
        values["newcomers"] = NewcomerRules(
            allow=tuple(rules["allow"]), deny=tuple(rules["deny"]), **rates
        )
    return EndpointConfig(**values)
