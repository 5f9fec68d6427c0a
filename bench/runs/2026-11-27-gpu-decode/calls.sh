#!/bin/bash
# call3.sh: tests of the kernels, layers and loads by both builds, sizes
D=$(cd "$(dirname "$0")" && pwd); W=/tmp/w; R=$W/r; rm -rf $R; mkdir -p $R; cd $W
tar xJf $D/bin.tar.xz; cp $D/show.py $R/; date
(./new make-checkpoint --preset deepseek-v3 --layers 1 --out /dev/shm/ds > $R/make.txt 2>&1) & M=$!
t() { n=$1; shift; timeout 100 "$@" > $R/$n.txt 2>&1; echo "$n: exit $? $(tail -1 $R/$n.txt | cut -c1-120)"; }
t kernels ./kernels_test --seed 7
t experts ./expert_test --seed 7
t expire ./expert_test --expire --seed 7
t check4 ./moe_bench --ranks 4 --set check --seed 7 --limit 60
b() { out=$1; shift; timeout 40 "$@" > $R/$out.json 2> $R/$out.err || echo "FAILED $out $(tail -c 300 $R/$out.err)"; }
for p in qwen3-30b-a3b deepseek-v3; do for s in 1-1 1-3 2-2; do for x in base_bin new; do
b $x-$p-$s ./$x --json bench moe --device cuda --preset $p --wire-dtype fp8 --seconds 0.5 --tokens 1,8,32 --clients ${s%-*} --servers ${s#*-}
done; python3 $R/show.py $R/*-$p-$s.json; done; done
b line-q-1-1 ./new --json bench moe --device cuda --preset qwen3-30b-a3b --wire-dtype fp8 --seconds 0.5 --tokens 1,8 --timeline
python3 $R/show.py $R/line-q-1-1.json
for p in qwen3-30b-a3b deepseek-v3; do
b kill-$p ./new --json bench moe --device cuda --preset $p --wire-dtype fp8 --tokens 128 --servers 2 --kill --kills 4 --seconds 0.5
python3 -c "import json;k=json.load(open('$R/kill-$p.json'))['killed'];print('kill $p wrong',k['wrong'],'stalls us',[round(s) for s in k['stalls_us']],'after',round(k['ratio'],3))"
done
wait $M; tail -1 $R/make.txt
python3 $D/serve_time.py ./new /dev/shm/ds cuda:0 4 | tee $R/serve.jsonl
python3 $D/serve_time.py ./base_bin /dev/shm/ds cuda:0 2 | tee -a $R/serve.jsonl
tar cJf $OUT/r.tar.xz -C $W r
t sizes ./moe_bench --ranks 4 --set sizes --seed 2 --limit 90
t memcheck timeout 90 compute-sanitizer --tool memcheck --error-exitcode 9 ./kernels_test --quick --seed 7
t racecheck timeout 90 compute-sanitizer --tool racecheck --error-exitcode 9 ./kernels_test --quick --seed 7 --only expert_recv
tar cJf $OUT/r.tar.xz -C $W r; date
