"""CNNEncoder: features of an image."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnx_ppo.networks.routing import shape_of
from nnx_ppo.networks.types import ModuleState, StatefulModule, StatefulModuleOutput


class CNNEncoder(StatefulModule):
    """Convolutions with stride, then a linear layer: [*batch, height, width, channels] -> [*batch, out_features].

    The defaults follow the network of Mnih et al. 2015, smaller. Integer images (0 to 255) are divided by 255.

    Args:
      image_shape: (height, width, channels).
      out_features: size of the output.
      rngs: stream that the initial parameters are drawn from.
      channels: output channels of each convolution.
      kernel_sizes: side of each convolution's window, pixels.
      strides: step of each convolution, pixels.
      activation: applied after every layer, the last included.
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        out_features: int,
        rngs: nnx.Rngs,
        channels: Sequence[int] = (16, 32),
        kernel_sizes: Sequence[int] = (8, 4),
        strides: Sequence[int] = (4, 2),
        activation: Callable[[jax.Array], jax.Array] = nnx.relu,
    ):
        self.image_shape = tuple(image_shape)
        if len(self.image_shape) != 3:
            raise ValueError(f"CNNEncoder got image_shape={self.image_shape}; (height, width, channels) is accepted.")
        if not len(channels) == len(kernel_sizes) == len(strides) or not channels:
            raise ValueError(
                f"CNNEncoder got {len(channels)} channels, {len(kernel_sizes)} kernel_sizes and {len(strides)} "
                "strides; give one of each per convolution, and at least one convolution."
            )
        height, width, depth = self.image_shape
        convolutions = []
        for out, kernel, stride in zip(channels, kernel_sizes, strides, strict=True):
            convolutions.append(nnx.Conv(depth, out, (kernel, kernel), stride, padding="SAME", rngs=rngs))
            height, width, depth = -(-height // stride), -(-width // stride), out
        self.convolutions = nnx.List(convolutions)
        self.linear = nnx.Linear(height * width * depth, out_features, rngs=rngs)
        self.activation = activation

    def __call__(
        self, state: ModuleState, obs: Float[Array, "*batch height width channels"], rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """Encode.

        Raises:
          ValueError: the images have another shape than the encoder was built for.
        """
        if getattr(obs, "shape", ())[-3:] != self.image_shape:
            raise ValueError(f"CNNEncoder takes images of shape {self.image_shape} and got {shape_of(obs)}.")
        x = obs / 255.0 if jnp.issubdtype(obs.dtype, jnp.integer) else obs
        for convolution in self.convolutions:
            x = self.activation(convolution(x))
        x = self.activation(self.linear(x.reshape(*x.shape[:-3], -1)))
        return StatefulModuleOutput(state, x, jnp.zeros(()), {})
