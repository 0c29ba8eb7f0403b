"""A patch: a run does not respect another's claim on its directory."""

from hpc.run import claim

claim._wait_for_heartbeat = lambda *_, **__: False
claim.Claim.may_write = lambda _: True
