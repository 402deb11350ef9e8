"""The networks that `models.py` measures: random weights, one tensor in, one or several out."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import image_networks
import torch
from torch import Tensor, nn


class VaeDecoder(nn.Module):
    """The decoder of SDXL's autoencoder: 8 pixels for a latent, [n, 4, h, w] to [n, 3, 8 h, 8 w]."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers.models.autoencoders.vae import Decoder

        self.decoder = Decoder(
            in_channels=4,
            out_channels=3,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(128, 256, 512, 512),
            layers_per_block=2,
        )

    def forward(self, latent: Tensor) -> Tensor:
        return self.decoder(latent)


class Unet(nn.Module):
    """The UNet of Stable Diffusion 1.5 at one time step, for a text of 77 tokens."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers import UNet2DConditionModel

        self.unet = UNet2DConditionModel(sample_size=64, cross_attention_dim=768)
        self.register_buffer("time", torch.tensor(500))
        self.register_buffer("text", torch.randn(1, 77, 768))

    def forward(self, latent: Tensor) -> Tensor:
        text = self.text.expand(latent.shape[0], -1, -1)
        return self.unet(latent, self.time, text, return_dict=False)[0]


def _torchvision(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchvision

        return getattr(torchvision.models, name)(weights=None)

    return build


@dataclass(frozen=True, eq=False)
class Network:
    build: Callable[[], nn.Module]
    needs: str
    channels: int
    # Height and width of an input, and of that by which errors are measured.
    size: dict[str, int]
    small: int
    # Batches by kind of device.
    batches: dict[str, list[int]]


def _images(name: str, batch: int = 64) -> Network:
    size, batches = {"cuda": 224, "cpu": 224}, {"cuda": [batch, 1], "cpu": [1]}
    return Network(_torchvision(name), "torchvision", 3, size, 224, batches)


def _own(build: Callable[[], nn.Module], batch: int, on_cuda: int, on_cpu: int) -> Network:
    """One of `image_networks`, with the sizes of its images."""
    return Network(build, "torch", 3, {"cuda": on_cuda, "cpu": on_cpu}, 64, {"cuda": [batch, 1], "cpu": [1]})


def _latents(build: Callable[[], nn.Module], size: int, batch: int, on_cpu: Sequence[int] = (1,)) -> Network:
    batches = {"cuda": [batch], "cpu": [*on_cpu]}
    return Network(build, "diffusers", 4, {"cuda": size, "cpu": 16}, 16, batches)


# Those that say most come first.
NETWORKS = {
    "vgg16_bn": _images("vgg16_bn", 32),
    "resnet18": _images("resnet18"),
    "resnet50": _images("resnet50"),
    "vae_decoder": _latents(VaeDecoder, 128, 1),
    "resnext50_32x4d": _images("resnext50_32x4d"),
    "mobilenet_v2": _images("mobilenet_v2"),
    "convnext_tiny": _images("convnext_tiny"),
    "efficientnet_b0": _images("efficientnet_b0"),
    "densenet121": _images("densenet121"),
    "regnet_y_1_6gf": _images("regnet_y_1_6gf"),
    "detector": _own(image_networks.Detector, 16, 640, 256),
    "segmentation": _own(image_networks.Segmentation, 4, 512, 128),
    "edsr": _own(image_networks.Edsr, 4, 128, 32),
    "esrgan": _own(image_networks.Esrgan, 4, 128, 32),
    # Its copies, one in f64, are more than 24 GiB.
    "unet": _latents(Unet, 64, 2, on_cpu=()),
}
# A step of training takes smaller images and batches on a CPU.
TRAINED = {
    name: Network(
        _torchvision(name),
        "torchvision",
        3,
        {"cuda": 224, "cpu": 112},
        112,
        {"cuda": [batch], "cpu": [4]},
    )
    for name, batch in [("resnet18", 64), ("vgg11_bn", 32)]
}


def missing(network: Network) -> str | None:
    """Why it cannot be built here."""
    if importlib.util.find_spec(network.needs) is None:
        return f"{network.needs} is not installed"
    return None


def example(network: Network, batch: int, size: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, network.channels, size, size, generator=generator)


@cache
def built(network: Network) -> nn.Module:
    """The network in f32 on the CPU; to be copied, not changed."""
    torch.manual_seed(0)
    model = network.build()
    for name, parameter in model.named_parameters():
        if name.endswith("layer_scale"):
            # ConvNeXt begins with 1e-6, with which its blocks would not show in the result.
            nn.init.constant_(parameter, 0.1)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            # Its random numbers would keep gradients from being compared.
            module.p = 0.0
    if norms:
        # Statistics of one batch, so that activations keep their size as in a trained network.
        momentum = norms[0].momentum
        with torch.no_grad():
            for norm in norms:
                norm.momentum = 1.0
            model.train()(example(network, 2, network.small))
        for norm in norms:
            norm.momentum = momentum
    return model.eval().requires_grad_(False)
