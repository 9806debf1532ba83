"""manyhead: multi-head attention on CPUs.

    import manyhead
    out = manyhead.attention(q, k, v, causal=True)

`attention` computes one call, `plan` prepares a kind of call, `MultiHeadAttention` is the layer with its projections,
`merge_state` and `merge_states` join partial results, `profile` says what calls spend their time on, `show_heads` draws
attention weights. `True` in a boolean mask means "may attend" everywhere but in `MultiHeadAttention.forward_torch`.
`manyhead --help`, or `python -m manyhead --help`, lists commands.
"""

from ._attention import BoundPlan, Plan, attention, plan
from ._heads import show_heads
from ._layer import MultiHeadAttention
from ._library import Error, OutOfMemory, __version__
from ._merge import merge_state, merge_states
from ._profile import Profile, profile
from ._runtime import isa, isas, machine, set_isa, set_threads, threads, version

__all__ = [
    "BoundPlan",
    "Error",
    "MultiHeadAttention",
    "OutOfMemory",
    "Plan",
    "Profile",
    "__version__",
    "attention",
    "isa",
    "isas",
    "machine",
    "merge_state",
    "merge_states",
    "plan",
    "profile",
    "set_isa",
    "set_threads",
    "show_heads",
    "threads",
    "version",
]
