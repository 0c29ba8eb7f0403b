# Modules of Isambard-AI, in env.sh and in jobs. Source in isambard_ai.yaml: [1]; NCCL's plugin for Slingshot
module load brics/nccl
