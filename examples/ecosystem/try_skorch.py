"""skorch: a classifier with scikit-learn's interface, in a pipeline and in a grid search."""

import numpy
import torch
from sklearn.datasets import make_classification
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNetClassifier
from trial import Program, Results, falls, main


def classifier(device: torch.device) -> NeuralNetClassifier:
    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2), torch.nn.Softmax(-1))
    options = {"max_epochs": 10, "batch_size": 64, "iterator_train__shuffle": False, "verbose": 0, "train_split": None}
    return NeuralNetClassifier(module, optimizer=torch.optim.Adam, lr=1e-2, device=str(device), **options)


def data() -> tuple[numpy.ndarray, numpy.ndarray]:
    x, y = make_classification(400, 10, n_informative=6, random_state=0)
    return x.astype(numpy.float32), y.astype(numpy.int64)


def pipeline(device: torch.device) -> Results:
    x, y = data()
    net = classifier(device)
    model = make_pipeline(StandardScaler(), net).fit(x, y)
    assert next(net.module_.parameters()).device.type == device.type
    losses = net.history[:, "train_loss"]
    return {"losses": falls(losses), "probabilities": torch.from_numpy(model.predict_proba(x))}


def grid_search(device: torch.device) -> Results:
    x, y = data()
    search = GridSearchCV(classifier(device), {"lr": [1e-3, 1e-2]}, cv=2, refit=False, scoring="neg_log_loss")
    return {"scores": torch.from_numpy(search.fit(x, y).cv_results_["mean_test_score"])}


main(
    "skorch",
    [
        Program("NeuralNetClassifier in a pipeline", pipeline, tolerance=1e-3),
        Program("GridSearchCV", grid_search, tolerance=1e-3, runs=2),
    ],
)
