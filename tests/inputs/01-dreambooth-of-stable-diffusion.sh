accelerate launch train_dreambooth.py \
  --pretrained_model_name_or_path someone/stable-diffusion --instance_data_dir photos \
  --instance_prompt "a photo of a grey cat" --max_train_steps 400 --resolution 512 \
  --train_batch_size 1 --learning_rate 5e-6 --lr_scheduler constant --output_dir out
