"""torchvision: transforms on the device, operators for boxes, training a classifier and a detector."""

import torch
import torchvision
from torchvision import ops, tv_tensors
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.rpn import AnchorGenerator
from torchvision.transforms import v2
from trial import Program, Results, falls, main, on


def transforms(device: torch.device) -> Results:
    image = tv_tensors.Image(torch.randint(0, 256, (3, 48, 64), dtype=torch.uint8)).to(device)
    boxes = tv_tensors.BoundingBoxes(
        torch.tensor([[4, 4, 20, 30], [10, 2, 60, 40]]), format="XYXY", canvas_size=(48, 64)
    ).to(device)
    torch.manual_seed(1)
    change = v2.Compose(
        [
            v2.RandomResizedCrop(32, antialias=True),
            v2.RandomHorizontalFlip(1.0),
            v2.ColorJitter(0.2, 0.2, 0.2, 0.1),
            v2.RandomRotation(20),
            v2.GaussianBlur(3),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5] * 3, [0.25] * 3),
        ]
    )
    changed, changed_boxes = change(image, boxes)
    equalized = v2.functional.equalize(image)
    return {"image": on(changed, device), "boxes": on(changed_boxes, device).float(), "equalized": equalized.float()}


def random_boxes(count: int) -> torch.Tensor:
    corner = 40 * torch.rand(count, 2)
    return torch.cat([corner, corner + 5 + 20 * torch.rand(count, 2)], 1)


def operators(device: torch.device) -> Results:
    boxes, scores = random_boxes(50).to(device), torch.rand(50).to(device)
    features = torch.randn(1, 8, 16, 16).to(device).requires_grad_()
    rois = torch.cat([torch.zeros(4, 1), random_boxes(4) / 4], 1).to(device)
    aligned = ops.roi_align(features, rois, output_size=5)
    pooled = ops.roi_pool(features, rois, output_size=5)
    weight = torch.randn(8, 8, 3, 3).to(device)
    offset = torch.randn(1, 18, 16, 16).to(device)
    deformed = ops.deform_conv2d(features, offset, weight, padding=1)
    (aligned.sum() + pooled.square().sum() + deformed.square().mean()).backward()
    return {
        "nms": on(ops.nms(boxes, scores, 0.3), device),
        "batched nms": on(ops.batched_nms(boxes, scores, (torch.arange(50) % 3).to(device), 0.3), device),
        "aligned": on(aligned, device),
        "pooled": pooled,
        "deformed": deformed,
        "gradient": features.grad,
    }


def classifier(device: torch.device) -> Results:
    x, y = torch.randn(16, 3, 32, 32).to(device), (torch.arange(16) % 4).to(device)
    torch.manual_seed(2)
    model = torchvision.models.squeezenet1_1(num_classes=4, dropout=0.0).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(10):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": falls(losses)}


def detector(device: torch.device) -> Results:
    torch.manual_seed(3)
    backbone = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, stride=4, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3, stride=2, padding=1)
    )
    backbone.out_channels = 32  # type: ignore[assignment]
    model = FasterRCNN(
        backbone,
        num_classes=None,
        rpn_anchor_generator=AnchorGenerator(sizes=((16, 32),), aspect_ratios=((1.0,),)),
        box_roi_pool=ops.MultiScaleRoIAlign(["0"], output_size=3, sampling_ratio=2),
        box_head=torchvision.models.detection.faster_rcnn.TwoMLPHead(32 * 9, 64),
        box_predictor=torchvision.models.detection.faster_rcnn.FastRCNNPredictor(64, 3),
        min_size=64,
        max_size=64,
        rpn_batch_size_per_image=1_000_000,  # all anchors and boxes: sampling draws other numbers on each device
        box_batch_size_per_image=1_000_000,
        rpn_positive_fraction=1.0,
        box_positive_fraction=1.0,
    ).to(device)
    image = torch.zeros(3, 64, 64)
    image[:, 10:34, 20:44] = 1
    target = {"boxes": torch.tensor([[20.0, 10.0, 44.0, 34.0]]).to(device), "labels": torch.tensor([1]).to(device)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    losses = []
    for _ in range(6):
        loss = sum(model([image.to(device)], [target]).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.inference_mode():
        found = model.eval()([image.to(device)])[0]
    on(found["boxes"], device)
    return {"losses": falls(losses), "scores": found["scores"][:5]}


main(
    "torchvision",
    [
        # For images of integers, PyTorch resizes in integers on the CPU only: levels differ by one.
        Program("transforms v2", transforms, tolerance=2e-2),
        Program("nms, roi_align, roi_pool, deform_conv2d", operators, tolerance=1e-3),
        Program("training SqueezeNet", classifier, tolerance=1e-3),
        Program("training and running Faster R-CNN", detector, tolerance=1e-2, runs=2),
    ],
)
