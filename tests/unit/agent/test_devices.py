"""Which accelerators an agent says that its machine has."""

from zero_agent.node.strain import devices


def test_the_gpus_of_a_machine_are_counted_by_model(tmp_path):
    assert devices(tmp_path) == ""
    gpus = tmp_path / "proc" / "driver" / "nvidia" / "gpus"
    for number, model in enumerate(["H100 80GB HBM3"] * 2 + ["A10"]):
        of = gpus / f"0000:{number}0:00.0"
        of.mkdir(parents=True)
        text = f"Model: \t\t NVIDIA {model}\nIRQ:   \t\t {90 + number}\nGPU UUID: \t GPU-{number}\n"
        (of / "information").write_text(text)
    (gpus / "0000:90:00.0").mkdir()  # it does not answer
    assert devices(tmp_path) == "2 x NVIDIA H100 80GB HBM3, 1 x NVIDIA A10"
