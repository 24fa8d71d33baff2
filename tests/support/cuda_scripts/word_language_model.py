"""A recurrent language model, in the style of pytorch/examples word_language_model."""

import math

import torch
import torch.nn as nn

torch.manual_seed(1111)
if torch.cuda.is_available():
    torch.cuda.manual_seed(1111)
    device = torch.device("cuda")
else:
    device = torch.device("cpu")
ntoken, ninp, nhid, bptt, clip, lr = 50, 16, 24, 8, 0.25, 5.0


class RNNModel(nn.Module):
    def __init__(self, rnn_type):
        super().__init__()
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn_type = rnn_type
        self.rnn = getattr(nn, rnn_type)(ninp, nhid, 2)
        self.decoder = nn.Linear(nhid, ntoken)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.encoder(input), hidden)
        return nn.functional.log_softmax(self.decoder(output).view(-1, ntoken), dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        if self.rnn_type == "LSTM":
            return (weight.new_zeros(2, bsz, nhid), weight.new_zeros(2, bsz, nhid))
        return weight.new_zeros(2, bsz, nhid)


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


data = (torch.arange(600) * 7 % 31 + torch.randint(0, 3, (600,))).view(4, -1).t().contiguous().to(device)
for rnn_type in ("LSTM", "GRU"):
    model = RNNModel(rnn_type).to(device)
    criterion = nn.NLLLoss()
    hidden = model.init_hidden(4)
    for i in range(0, 10 * bptt, bptt):
        source, targets = data[i : i + bptt], data[i + 1 : i + 1 + bptt].view(-1)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(source, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        print(f"| {rnn_type} | loss {loss.item():.4f} | ppl {math.exp(loss.item()):.2f}")
