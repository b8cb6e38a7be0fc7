"""A race, from outside: what it finds, how it goes on after a stop, and what it refuses."""

A, B = "--model.effect_a 0.7", "--model.effect_b 1.4"


def test_x(experiments):
    import time
    t=time.process_time(); import os
    t0=os.times()
    r = experiments.race(A, B, "--model.effect_c 1.0001")
    t1=os.times()
    print(r, experiments.errors, [b-a for a,b in zip(t0,t1)], len(experiments.started()))
    r2=experiments.race(A, B, "--model.effect_c 1.0001", json=False)
    print(r2, experiments.errors)
    r2=experiments.race(A, B, "--model.effect_c 1.0001", json=False)
    print(r2, experiments.errors)
    assert 0
