"""From planned micro-batches to tensors: `dataloader` serves the steps, `inputs` cuts a rank's share."""
