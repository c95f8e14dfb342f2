"""``benchmarks/offline_job.py`` draws the job whose rates others report."""

from offline_job import draw_job


def test_the_job_has_as_many_tokens_as_the_one_that_others_report():
    prompts, lengths = draw_job()
    assert len(prompts) == len(lengths) == 256
    assert sum(map(len, prompts)) == 142_827
    assert sum(lengths) == 133_966
