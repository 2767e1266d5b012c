"""Equal work in Megatron's hybrid context parallelism: a scheduler in place of its `BalancedCPScheduler`.

A sample runs on neighbouring ranks, as many as its width, and each does an equal part of its work. The widest
are dealt out first, each to ranks that have the least to do, and every rank runs its own in this order:

    rank 0  AAAABBBd
    rank 1  AAAABBBe
    rank 2  AAAAccff
    rank 3  AAAAgggg

The ranks of a sample have all done the same before it, so they reach it together. Nobody waits before the end
of the step, and the step is one of Megatron's groups, between which it has barriers.
"""

from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

from wlb_titan import balance


class EqualWorkScheduler(BalancedCPScheduler):
    """Gives a sample the fewest ranks that hold it, or more if it alone would take longer than the mean."""

    def get_groups_and_subsamples(self, sample_id_seqlens, config):
        """Tokens and ids of samples by group (here one) and rank, from pairs of id and tokens."""
        ranks, most, work = self.total_hdp_gpus, self.max_seq_len_per_rank, self.get_total_workload
        if (longest := max(tokens for _, tokens in sample_id_seqlens)) > ranks * most:
            raise ValueError(
                f"A sample of {longest} tokens does not fit into {ranks} ranks of {most} tokens."
            )
        # Megatron has process groups of these sizes, from each multiple of the size on, and one of all ranks.
        widths = [2**i for i in range(ranks.bit_length() - 1) if ranks % 2**i == 0] + [ranks]
        mean = sum(work(tokens, 1) for _, tokens in sample_id_seqlens) / ranks
        by_width = {width: [] for width in reversed(widths)}
        for sample, tokens in sample_id_seqlens:
            enough = (width for width in widths if tokens <= width * most and work(tokens, width) <= mean)
            by_width[next(enough, ranks)].append((sample, tokens))
        own, done = [[] for _ in range(ranks)], [0.0] * ranks
        for width, samples in by_width.items():
            if not samples:
                continue
            # What ranks have done is an item too, so long that each bin has one. Work must be above 0.
            firsts, number = range(0, ranks, width), len(samples)
            bins = balance(
                [number + 1] * len(firsts) + [1] * number,
                ranks=len(firsts),
                micro_batches=1,
                tokens_per_rank=2 * number + 1,
                cost=[1 + done[first] for first in firsts] + [work(tokens, width) for _, tokens in samples],
            ).micro_batches
            for ((block, *items),) in bins:
                taken = [samples[item - len(firsts)] for item in items]
                for rank in range(firsts[block], firsts[block] + width):
                    own[rank] += taken
                    done[rank] += sum(work(tokens, width) for _, tokens in taken)
        return [[[tokens for _, tokens in some] for some in own]], [
            [[one for one, _ in some] for some in own]
        ]
