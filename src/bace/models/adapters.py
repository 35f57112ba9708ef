"""Bottleneck adapters: small trainable layers in a frozen transformer.

Houlsby et al., Parameter-Efficient Transfer Learning for NLP, ICML 2019; two per block, as ROW (Kim et al., ICML 2023)
puts them into DeiT.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from bace.errors import ConfigError
from bace.models.encoder import Encoder, frozen_modules


class Adapter(nn.Module):
    """u -> u + up(relu(down(u))), exactly the identity at first.

    `up` starts at zero, which makes it the identity. `down` starts like any layer before a ReLU (He et al., 2015): with
    a tiny `down`, `up` would get almost no gradient, and therefore `down` would not either. Gates on the hidden and the
    output units (HAT) multiply the outputs of `down` and `up` by forward hooks.
    """

    def __init__(self, width: int, hidden: int, generator: torch.Generator) -> None:
        super().__init__()
        if hidden < 1:
            raise ConfigError(f"an adapter needs at least 1 hidden unit, not {hidden}. The paper uses 64 or 128.")
        # On "meta", torch's own initialisation does nothing; on the CPU it would draw from the global generator.
        self.down = nn.Linear(width, hidden, device="meta").to_empty(device="cpu")
        self.up = nn.Linear(hidden, width, device="meta").to_empty(device="cpu")
        nn.init.kaiming_normal_(self.down.weight, nonlinearity="relu", generator=generator)
        for zero in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(zero)

    def forward(
        self,
        u: Tensor,  # (..., width)
    ) -> Tensor:  # (..., width)
        change: Tensor = self.up(torch.relu(self.down(u)))
        return u + change


def add_adapters(encoder: Encoder, hidden: int, generator: torch.Generator) -> list[Adapter]:
    """Insert an adapter after the attention and after the MLP of every block, inside the residual branch, in place.

    Afterwards only the adapters and all LayerNorms are trainable. The encoder's outputs do not change. A prefix that is
    already frozen gets no adapters and stays frozen. A prefix that is frozen later keeps its adapters, which are the
    identity.

    Returns:
        The adapters from the lowest block up, attention before MLP.
    """
    if any(isinstance(module, Adapter) for module in encoder.modules()):
        raise ConfigError("this encoder already has adapters: add them once.")
    frozen = {module for part in frozen_modules(encoder) for module in part.modules()}
    encoder.requires_grad_(False)
    adapters = []
    for block in encoder.blocks[encoder.frozen or 0 :]:
        for parent, name in encoder.adapter_sites(block):
            linear = parent.get_submodule(name)
            adapter = Adapter(encoder.width, hidden, generator).to(next(linear.parameters()).device)
            setattr(parent, name, nn.Sequential(OrderedDict(linear=linear, adapter=adapter)))
            adapters.append(adapter)
    for module in encoder.modules():
        if isinstance(module, nn.LayerNorm) and module not in frozen:
            module.requires_grad_(True)
    return adapters


def own_adapters(encoder: Encoder, hidden: int, generator: torch.Generator) -> list[Adapter]:
    """The adapters for a method that needs them: those of the encoder, or new ones."""
    found = [module for module in encoder.modules() if isinstance(module, Adapter)]
    return found or add_adapters(encoder, hidden, generator)
