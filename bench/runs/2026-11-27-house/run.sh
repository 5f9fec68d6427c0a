#!/bin/bash
# Before and after in turns: bench p2p (shm), bench moe, demo. Usage: run.sh BEFORE AFTER OUT
set -u
A=$1; B=$2; O=$3
nproc > $O/machine.txt; lscpu >> $O/machine.txt; uname -a >> $O/machine.txt
for i in 1 2 3 4 5; do
  for v in before after; do
    bin=$A; [ $v = after ] && bin=$B
    timeout 60 taskset -c 0-3 $bin bench p2p --json --min-bytes 8 --max-bytes 1048576 --transport shm > $O/p2p-$v-$i.json 2>$O/p2p-$v-$i.err || echo "p2p $v $i rc $?"
  done
done
echo p2p done
for i in 1 2 3; do
  for v in before after; do
    bin=$A; [ $v = after ] && bin=$B
    timeout 120 $bin bench moe --json --tokens 1,16,64,256 --threads 8 > $O/moe-$v-$i.json 2>$O/moe-$v-$i.err || echo "moe $v $i rc $?"
  done
done
echo moe done
for i in 1 2 3 4 5; do
  for v in before after; do
    bin=$A; [ $v = after ] && bin=$B
    timeout 60 $bin demo --json --model data/tiny-moe > $O/demo-$v-$i.json 2>$O/demo-$v-$i.err || echo "demo $v $i rc $?"
  done
done
echo demo done
