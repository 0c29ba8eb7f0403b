"""Attributes of samplers that change, by a hook or as an order is drawn: they are kept in a resumed run."""

from typing import Any

from torch.utils.data import Dataset

from hpc.state import checksums, plain_forms

Fingerprints = list[dict[str, Any]]  # of the attributes of each sampler, by their names
States = list[dict[str, Any]]  # plain forms of the attributes that have changed, likewise


def samplers_of(sampler: Any) -> list[Any]:
    """Return a sampler and those inside of it, as a batch sampler has one."""
    samplers: list[Any] = []
    to_visit = [sampler]
    while to_visit:
        visited = to_visit.pop(0)
        if hasattr(visited, "__dict__") and all(visited is not other for other in samplers):
            samplers.append(visited)
            to_visit += [vars(visited).get(name) for name in ("sampler", "batch_sampler")]
    return samplers


def generators_of(sampler: Any) -> list[Any]:
    """Return the generators that samplers keep in their attributes."""
    values = (value for each in samplers_of(sampler) for value in vars(each).values())
    return [value for value in values if plain_forms.is_generator(value)]


def fingerprints(sampler: Any) -> Fingerprints:
    """Return fingerprints by which `changed` knows what has changed since."""
    return [
        {name: checksums.fingerprint(value) for name, value in _plain_attributes(each)} for each in samplers_of(sampler)
    ]


def changed(sampler: Any, initial: Fingerprints) -> States:
    """Return the attributes that have changed since `fingerprints`. The seed of an order is that of its epoch."""
    states: States = []
    for each, before in zip(samplers_of(sampler), initial, strict=False):
        values = {
            name: value for name, value in _plain_attributes(each) if checksums.fingerprint(value) != before.get(name)
        }
        forms = {name: plain_forms.to_plain_on_host(value) for name, value in values.items()}
        states.append({name: form for name, form in forms.items() if form != plain_forms.NOT_KEPT})
    return states


def restore(sampler: Any, states: States) -> None:
    """Set the result of `changed`."""
    for each, state in zip(samplers_of(sampler), states, strict=False):
        for name, form in state.items():
            plain_forms.set_attribute(each, name, form=form)


def _plain_attributes(sampler: Any) -> list[tuple[str, Any]]:
    values = plain_forms.attributes_with_plain_form(sampler).items()
    return [
        (name, value)
        for name, value in values
        if not plain_forms.is_generator(value) and not isinstance(value, Dataset)
    ]
