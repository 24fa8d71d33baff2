"""torchmetrics: classification, regression, image and text metrics with their states on the device."""

import torch
import torchmetrics
from torchmetrics.classification import BinaryAUROC, MulticlassConfusionMatrix, MulticlassF1Score
from torchmetrics.image import PeakSignalNoiseRatio, StructuralSimilarityIndexMeasure
from torchmetrics.regression import PearsonCorrCoef, SpearmanCorrCoef
from torchmetrics.text import Perplexity
from trial import Program, Results, main, on


def computed(collection: torchmetrics.MetricCollection, device: torch.device, batches: list[tuple]) -> Results:
    collection = collection.to(device)
    for batch in batches:
        collection.update(*(one.to(device) for one in batch))
    return {name: on(one, device) for name, one in collection.compute().items()}


def classification(device: torch.device) -> Results:
    metrics: list[torchmetrics.Metric] = [
        torchmetrics.Accuracy(task="multiclass", num_classes=5),
        MulticlassF1Score(5),
        MulticlassConfusionMatrix(5),
        torchmetrics.AUROC(task="multiclass", num_classes=5),
        torchmetrics.AveragePrecision(task="multiclass", num_classes=5),
        torchmetrics.CalibrationError(task="multiclass", num_classes=5),
    ]
    batches = [(torch.randn(64, 5).softmax(1), torch.randint(0, 5, (64,))) for _ in range(4)]
    found = computed(torchmetrics.MetricCollection(metrics), device, batches)
    binary = [(torch.rand(64), torch.randint(0, 2, (64,))) for _ in range(4)]
    return {**found, **computed(torchmetrics.MetricCollection([BinaryAUROC(thresholds=20)]), device, binary)}


def regression(device: torch.device) -> Results:
    metrics = [torchmetrics.MeanSquaredError(), torchmetrics.R2Score(), PearsonCorrCoef(), SpearmanCorrCoef()]
    x = torch.randn(4, 64)
    batches = [(one, one + 0.3 * torch.randn(64)) for one in x]
    return computed(torchmetrics.MetricCollection(metrics), device, batches)


def images(device: torch.device) -> Results:
    metrics = [StructuralSimilarityIndexMeasure(data_range=1.0), PeakSignalNoiseRatio(data_range=1.0)]
    x = torch.rand(2, 4, 3, 32, 32)
    batches = [(one, (one + 0.1 * torch.rand(4, 3, 32, 32)).clamp(max=1)) for one in x]
    return computed(torchmetrics.MetricCollection(metrics), device, batches)


def text(device: torch.device) -> Results:
    batches = [(torch.randn(2, 10, 50), torch.randint(0, 50, (2, 10)))]
    return computed(torchmetrics.MetricCollection([Perplexity()]), device, batches)


main(
    "torchmetrics",
    [
        Program("classification", classification),
        Program("regression", regression),
        Program("images", images),
        Program("perplexity", text),
    ],
)
