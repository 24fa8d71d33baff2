"""torchaudio: features, filters, resampling, alignment, and training a Conformer."""

import torch
import torchaudio
from torchaudio import functional, transforms
from trial import Program, Results, falls, main, on

RATE = 8000


def sound(device: torch.device) -> torch.Tensor:
    time = torch.arange(RATE // 2) / RATE
    return torch.stack([torch.sin(2 * torch.pi * 440 * time), torch.sin(2 * torch.pi * 880 * time**2)]).to(device)


def features(device: torch.device) -> Results:
    wave = sound(device)
    spectrogram = transforms.MelSpectrogram(RATE, n_fft=256, n_mels=32).to(device)
    mfcc = transforms.MFCC(RATE, n_mfcc=13, melkwargs={"n_fft": 256, "n_mels": 32}).to(device)
    complex_spectrum = transforms.Spectrogram(n_fft=256, power=None).to(device)(wave)
    return {
        "mel": on(spectrogram(wave), device).log1p(),
        "mfcc": mfcc(wave),
        "decibels": transforms.AmplitudeToDB()(spectrogram(wave)),
        "inverse": transforms.InverseSpectrogram(n_fft=256).to(device)(complex_spectrum),
        "stretched": transforms.TimeStretch(n_freq=129, fixed_rate=1.2).to(device)(complex_spectrum).abs(),
    }


def filters(device: torch.device) -> Results:
    wave = sound(device)
    return {
        "resampled": on(transforms.Resample(RATE, 5000).to(device)(wave), device),
        "lowpass": functional.lowpass_biquad(wave, RATE, 1000.0),
        "lfilter": functional.lfilter(wave, torch.tensor([1.0, -0.5]).to(device), torch.tensor([0.5, 0.1]).to(device)),
        "convolved": functional.fftconvolve(wave, wave.flip(1)) / 1000,
    }


def alignment(device: torch.device) -> Results:
    scores = torch.randn(1, 20, 6).log_softmax(-1).to(device)
    path, aligned = functional.forced_align(scores, torch.tensor([[1, 2, 3]]).to(device), blank=0)
    return {"path": on(path, device), "scores": aligned}


def conformer(device: torch.device) -> Results:
    torch.manual_seed(1)
    model = torchaudio.models.Conformer(
        input_dim=16, num_heads=2, ffn_dim=32, num_layers=1, depthwise_conv_kernel_size=7, dropout=0.0
    ).to(device)
    x, lengths = torch.randn(4, 24, 16).to(device), torch.full((4,), 24).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(10):
        found, _ = model(x, lengths)
        loss = torch.nn.functional.mse_loss(found, x.flip(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": falls(losses)}


main(
    "torchaudio",
    [
        Program("spectrograms, MFCC, time stretch", features, tolerance=1e-3),
        Program("resampling and filters", filters, tolerance=1e-3),
        Program("forced alignment", alignment),
        Program("training a Conformer", conformer, tolerance=1e-3),
    ],
)
