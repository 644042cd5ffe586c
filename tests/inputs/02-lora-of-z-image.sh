accelerate launch train_dreambooth_lora_z_image.py \
  --pretrained_model_name_or_path someone/z-image --instance_data_dir photos \
  --instance_prompt "a photo of a grey cat" --max_train_steps 400 --resolution 1024 \
  --train_batch_size 1 --learning_rate 1e-4 --output_dir out
