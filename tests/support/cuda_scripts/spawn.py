"""Workers by torch.multiprocessing.spawn, each of which chooses its GPU."""

import torch
import torch.multiprocessing as mp


def worker(rank, results):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    x = torch.ones(3, device="cuda") * (rank + 1)
    results.put((rank, str(x.device), x.sum().item()))


if __name__ == "__main__":
    mp.set_start_method("spawn")
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(worker, args=(queue,), nprocs=2)
    for _ in range(2):
        print(*queue.get())
