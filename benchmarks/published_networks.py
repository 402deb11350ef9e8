"""The networks of `published.py`: of torchvision, timm, segmentation_models_pytorch, MONAI and diffusers, with random weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Published:
    build: Callable[[], nn.Module]
    # Arguments of a call for images of a size, by position or by name.
    given: Callable[[int], tuple[Any, ...] | dict[str, Any]]
    # The size of a first and a second call.
    sizes: tuple[int, int]


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def images(channels: int = 3, batch: int = 1) -> Callable[[int], tuple[Any, ...]]:
    return lambda size: (noise(batch, channels, size, size),)


def _torchvision(name: str, where: str = "", **how: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchvision

        models = torchvision.models
        for part in filter(None, where.split(".")):
            models = getattr(models, part)
        weights = {"weights_backbone": None} if where in ("segmentation", "detection") else {}
        return getattr(models, name)(weights=None, **weights, **how)

    return build


def _timm(name: str, **how: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, **how)

    return build


def _of(package: str, name: str, *args: Any, **how: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import importlib

        return getattr(importlib.import_module(package), name)(*args, **how)

    return build


def _pyramid(size: int) -> tuple[Any, ...]:
    return ({"a": noise(1, 8, size, size), "b": noise(1, 16, size // 2, size // 2)},)


def _condition(size: int) -> dict[str, Any]:
    return {
        "sample": noise(1, 4, size, size),
        "timestep": torch.tensor(7),
        "encoder_hidden_states": noise(1, 7, 32),
    }


def _controlled(size: int) -> dict[str, Any]:
    return _condition(size) | {"controlnet_cond": noise(1, 3, 8 * size, 8 * size)}


def _steps(channels: int) -> Callable[[int], dict[str, Any]]:
    return lambda size: {"sample": noise(1, channels, size, size), "timestep": torch.tensor(7)}


_BLOCKS = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
_DOWN, _UP = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
_CROSS = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "cross_attention_dim": 32, "attention_head_dim": 8}
_CROSS_UP = {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
_CODER = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}

NETWORKS: dict[str, Published] = {}


def _add(library: str, sizes: tuple[int, int], builders: dict[str, Any], given: Any = None) -> None:
    for name, build in builders.items():
        NETWORKS[f"{library}/{name}"] = Published(build, given or images(), sizes)


_CLASSIFIERS = """alexnet vgg11 vgg16_bn resnet18 resnet50 resnext50_32x4d wide_resnet50_2 densenet121 mobilenet_v2
mobilenet_v3_small mobilenet_v3_large efficientnet_b0 efficientnet_v2_s regnet_y_400mf regnet_x_800mf shufflenet_v2_x1_0
squeezenet1_1 mnasnet1_0 convnext_tiny swin_t swin_v2_t""".split()
_add("torchvision", (96, 80), {name: _torchvision(name) for name in _CLASSIFIERS})
_add(
    "torchvision",
    (96, 80),
    {
        "googlenet": _torchvision("googlenet", init_weights=False),
        "inception_v3": _torchvision("inception_v3", init_weights=False),
    },
)
_add("torchvision", (224, 224), {"maxvit_t": _torchvision("maxvit_t"), "vit_b_16": _torchvision("vit_b_16")})
_SEGMENT = ("fcn_resnet50", "deeplabv3_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")
_add("torchvision", (64, 96), {name: _torchvision(name, "segmentation") for name in _SEGMENT}, images(batch=2))
_FRAMES = lambda size: (noise(1, 3, 4, size, size),)
_add("torchvision", (64, 48), {"r3d_18": _torchvision("r3d_18", "video")}, _FRAMES)
_PYRAMID = {"feature_pyramid": _of("torchvision.ops", "FeaturePyramidNetwork", [8, 16], 12)}
_add("torchvision", (32, 24), _PYRAMID, _pyramid)

_TIMM = """resnet26d resnetv2_50 resnetv2_50x1_bit seresnet18 skresnet18 ecaresnet26t resnest14d res2net50_26w_4s dla34 dpn68
hrnet_w18_small inception_next_tiny xception41 nfnet_l0 efficientnet_lite0 tf_efficientnetv2_b0 mixnet_s mobilenetv3_small_100
mobilenetv4_conv_small mobileone_s0 repvgg_a0 ghostnet_100 ghostnetv2_100 hardcorenas_a fbnetc_100 lcnet_050 tinynet_e
mobilevit_xs mobilevitv2_050 edgenext_xx_small efficientvit_b0 fastvit_t8 repghostnet_050 rexnet_100 selecsls42 semnasnet_075
cspresnet50 cspdarknet53 darknet53 ese_vovnet19b_dw convnextv2_atto convnext_atto poolformer_s12 pvt_v2_b0 regnety_002
starnet_s1 tresnet_m hgnet_tiny hgnetv2_b0 gernet_s gcresnext26ts focalnet_tiny_srf nf_regnet_b0
legacy_seresnet18 mnasnet_small vovnet39a""".split()
_add("timm", (96, 64), {name: _timm(name) for name in _TIMM})
_TIMM_224 = """efficientformer_l1 efficientvit_m0 levit_128s pit_ti_224 swiftformer_xs twins_svt_small visformer_tiny
xcit_nano_12_p8_224 vit_tiny_patch16_224 mixer_s32_224 resmlp_12_224 coat_tiny cait_xxs24_224 lambda_resnet26t
""".split()
_add("timm", (224, 224), {name: _timm(name) for name in _TIMM_224})
_add("timm", (256, 256), {name: _timm(name) for name in ("halonet26t", "botnet26t_256")})
_add("timm", (128, 160), {"inception_resnet_v2": _timm("inception_resnet_v2")})
_FEATURES = ("resnet18", "mobilenetv3_large_100", "efficientnet_b0", "hrnet_w18_small")
_add("timm", (64, 96), {f"{name}, features": _timm(name, features_only=True) for name in _FEATURES})


def _segments(name: str, encoder: str, **how: Any) -> Callable[[], nn.Module]:
    how = {"encoder_weights": None, "classes": 3} | how
    return _of("segmentation_models_pytorch", name, encoder, **how)


_SMP = [
    ("Unet", "resnet18"), ("UnetPlusPlus", "resnet18"), ("FPN", "mobilenet_v2"), ("PSPNet", "resnet18"),
    ("DeepLabV3", "resnet18"), ("DeepLabV3Plus", "mobilenet_v2"), ("MAnet", "resnet18"), ("Linknet", "efficientnet-b0"),
    ("UPerNet", "resnet18"), ("Segformer", "resnet18"), ("Unet", "densenet121"), ("Unet", "vgg11_bn"),
    ("Unet", "mit_b0"), ("Unet", "timm-mobilenetv3_small_100"), ("FPN", "se_resnet50"),
]  # fmt: skip
_add("segmentation_models", (96, 128), {f"{n}, {e}": _segments(n, e) for n, e in _SMP}, images(batch=2))

_add("segmentation_models", (256, 288), {"PAN, resnet18": _segments("PAN", "resnet18")}, images(batch=2))

_2D = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
_MONAI: dict[str, dict[str, Any]] = {
    "UNet": _2D | {"channels": (8, 16, 32), "strides": (2, 2), "num_res_units": 2},
    "BasicUNet": _2D | {"features": (8, 8, 16, 16, 32, 8)},
    "BasicUNetPlusPlus": _2D | {"features": (8, 8, 16, 16, 32, 8)},
    "AttentionUnet": _2D | {"channels": (8, 16, 32), "strides": (2, 2)},
    "SegResNet": _2D | {"init_filters": 8},
    "FlexibleUNet": {"spatial_dims": 2, "in_channels": 3, "out_channels": 2, "backbone": "efficientnet-b0", "pretrained": False},
    "VNet": _2D,
    "HighResNet": _2D,
    "DenseNet121": _2D,
    "EfficientNetBN": {"model_name": "efficientnet-b0", "spatial_dims": 2, "in_channels": 1, "num_classes": 2, "pretrained": False},
    "SEResNet50": {"spatial_dims": 2, "in_channels": 1, "num_classes": 2},
    "AutoEncoder": _2D | {"channels": (8, 16, 32), "strides": (2, 2, 2), "num_res_units": 1},
    "UNETR": _2D | {"img_size": 96, "feature_size": 8, "hidden_size": 48, "mlp_dim": 96, "num_heads": 4},
    "SwinUNETR": _2D | {"feature_size": 12},
    "DynUNet": _2D | {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2], "filters": [8, 16, 32]},
    "RegUNet": {"spatial_dims": 2, "in_channels": 1, "num_channel_initial": 8, "depth": 2, "out_channels": 2},
}
for _name, _how in _MONAI.items():
    _size = (96, 96) if _name in ("UNETR",) else (96, 64)
    _add("monai", _size, {_name: _of("monai.networks.nets", _name, **_how)}, images(_how["in_channels"]))

_in_latents = {"in_channels": 4, "out_channels": 4, "sample_size": 16}
_in_colours = {"in_channels": 3, "out_channels": 3}
_of_diffusers = lambda name, **how: {name: _of("diffusers", name, **how)}
_add(
    "diffusers",
    (16, 24),
    _of_diffusers("UNet2DModel", **_in_colours, **_BLOCKS, down_block_types=_DOWN, up_block_types=_UP, attention_head_dim=8),
    _steps(3),
)
_add("diffusers", (16, 24), _of_diffusers("UNet2DConditionModel", **_in_latents, **_BLOCKS, **_CROSS, **_CROSS_UP), _condition)
_add("diffusers", (8, 16), _of_diffusers("ControlNetModel", in_channels=4, **_BLOCKS, **_CROSS), _controlled)
_add("diffusers", (32, 48), _of_diffusers("AutoencoderKL", **_in_colours, **_BLOCKS, **_CODER, latent_channels=4))
_add("diffusers", (32, 48), _of_diffusers("VQModel", **_in_colours, **_BLOCKS, **_CODER, latent_channels=3))
_add("diffusers", (64, 96), _of_diffusers("T2IAdapter", in_channels=3, channels=[32, 64], num_res_blocks=1))
