#!/usr/bin/env bash
# A graph of AOTAutograd whose operators run one by one raises at a GroupNorm of one image, which PyTorch itself computes.
#
# `F.group_norm` lays its image out for the kernel `aten.native_group_norm`, if it has to. In a traced graph the tracer decides
# that, by strides that it has computed. For a view of one image whose pixels come from a linear layer, as behind attention, it says
# (128, 1, 32, 8), while the tensor has (8, 1, 32, 8): the stride of the dimension of one image is another one. So the tracer sees
# channels-last and lays nothing out, and the kernel, which sees neither channels-last nor row-major, raises. With two images
# the graph runs. torch 2.15.0 does not raise.
#
# Seen: torch 2.11.0 on a CPU. One image: "Expected X.is_contiguous(memory_format) to be true". Two images: as uncompiled.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet --disable-pip-version-check torch==2.11.0 numpy
cat > "$folder/example.py" <<'PYTHON'
import torch
from torch import nn


class Attended(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.GroupNorm(2, 8)

    def forward(self, image):
        pixels = self.linear(image.flatten(2).transpose(1, 2))
        return self.norm(pixels.transpose(1, 2).reshape(image.shape))


model, said = Attended().eval(), []
with torch.no_grad():
    for images in (1, 2):
        image = torch.randn(images, 8, 4, 4)
        torch._dynamo.reset()
        want = model(image)
        try:
            said.append("right" if torch.allclose(torch.compile(model, backend="aot_eager")(image), want) else "wrong")
        except RuntimeError as error:
            said.append(f"raises: {str(error).partition(',')[0]}")
print(f"torch {torch.__version__}: one image: {said[0]}; two images: {said[1]}")
raise SystemExit(not (said[0].startswith("raises: Expected X.is_contiguous") and said[1] == "right"))
PYTHON
"$folder/environment/bin/python" "$folder/example.py" || { echo "changed: see above"; exit 1; }
