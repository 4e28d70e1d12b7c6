"""Batches of equal cost on all ranks, for any training loop. In: the lengths of a dataset. Out: batch samplers, whose
batches of sample indices a torch DataLoader takes. Users call it; planning and execution do not.

The names below load on first use, torch only with those that need it.

DDP under torchrun: the gradients of a step are those of the mean over all its target tokens, on whichever rank.

    sampler = DistributedTokenBatchSampler(lengths, max_tokens=max_tokens)  # ranks are those of torch.distributed
    loader = DataLoader(features, batch_sampler=sampler, collate_fn=PackingCollator(), num_workers=2)
    if state:
        sampler.load_state_dict(state)
    for epoch in range(sampler.epoch, num_epochs):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader, sampler.num_done + 1):
            batch = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
            num_targets = batch["labels"].ne(-100).sum()
            torch.distributed.all_reduce(num_targets)
            share = num_targets / torch.distributed.get_world_size()  # DDP averages over ranks
            model(**batch, num_items_in_batch=share).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            save(sampler.state_dict(num_batches=number))  # beside the model's; workers have fetched further than this

accelerate: the sampler gives each rank its own batches, and `prepare` would divide them over the ranks once more (the
sampler refuses that): give it the model and the optimizer, and the loader to `prepare_data_loader` as of one process.

    sampler = DistributedTokenBatchSampler(lengths, max_tokens=max_tokens)  # after Accelerator()
    loader = DataLoader(features, batch_sampler=sampler, collate_fn=PackingCollator())
    loader = prepare_data_loader(loader, accelerator.device, num_processes=1, process_index=0, put_on_device=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    for epoch in range(num_epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            num_targets = accelerator.reduce(batch["labels"].ne(-100).sum())
            loss = model(**batch, num_items_in_batch=num_targets / accelerator.num_processes).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

The Trainer of transformers, which weights the loss in the same way by itself (average_tokens_across_devices):

    class PackedTrainer(Trainer):
        def get_train_dataloader(self):
            sampler = DistributedTokenBatchSampler(lengths, max_tokens=max_tokens)
            loader = DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)
            return prepare_data_loader(loader, self.args.device, num_processes=1, process_index=0, put_on_device=True)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynapipe_ext.lazy import lazy_names

if TYPE_CHECKING:
    from dynapipe_ext.batching.sampling.multipack import (
        MultipackDistributedBatchSampler,
        MultipackDistributedBatchSampler_LinearAttention,
    )
    from dynapipe_ext.batching.sampling.samplers import DistributedTokenBatchSampler, quadratic_coefficients
    from dynapipe_ext.batching.sampling.streaming import StreamingTokenBatches

_HOMES = {
    "DistributedTokenBatchSampler": "dynapipe_ext.batching.sampling.samplers",
    "MultipackDistributedBatchSampler": "dynapipe_ext.batching.sampling.multipack",
    "MultipackDistributedBatchSampler_LinearAttention": "dynapipe_ext.batching.sampling.multipack",
    "StreamingTokenBatches": "dynapipe_ext.batching.sampling.streaming",
    "quadratic_coefficients": "dynapipe_ext.batching.sampling.samplers",
}

__all__ = [
    "DistributedTokenBatchSampler",
    "MultipackDistributedBatchSampler",
    "MultipackDistributedBatchSampler_LinearAttention",
    "StreamingTokenBatches",
    "quadratic_coefficients",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
