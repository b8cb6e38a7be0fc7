"""Write a trained model as a folder that transformers opens without remote code: python export.py RUN OUT.

The folder has config.json, model.safetensors, generation_config.json, the tokenizer's files and a model card.
"""

if __name__ == "__main__":
    import sys

    sys.path.insert(0, __file__.rpartition("/")[0])  # where PYTHONSAFEPATH is set, Python leaves it out
    from runtime.cli.scripts import run_and_exit
    from trainer.pretrained.settings import ExportConfig

    run_and_exit("export", ExportConfig, module="trainer.pretrained.export")
