D=$1; W=/tmp/w; R=$W/r; mkdir -p $R; cd $W; cat /tmp/part.aa $D/target/carry-g1b/part.ab | xz -dc | tar x || exit 1
cp -r $D/data/tiny-moe .; mkdir -p data; cp -r $D/data/reference-formats $D/data/family-blocks data/; touch .unpacked; date; nvidia-smi -L | head -4
cat > show.py <<'P'
import json,sys
for f in sys.argv[1:]:
    try: d=json.load(open(f))
    except Exception as e: print(f,'FAILED',e); continue
    n=f.split('/')[-1][:-5]
    print(n,' | '.join('%d: %.1f /%.1f =%.3f c%.2f'%(r['tokens'],r['layer_us_p50'],r['compute_us'],r['ratio'],r['clients_per_batch']) for r in d['rows']),flush=True)
P
b() { out=$1; shift; timeout 40 "$@" > $R/$out.json 2> $R/$out.err || echo "FAILED $out $(tail -c 400 $R/$out.err)"; }
m() { v=$1 x=$2 p=$3 s=$4 k=$5; shift 5; b $v-$p-$s "$@" $x --json bench moe --device cuda --preset $p --wire-dtype fp8 --seconds 0.3 --tokens $k --clients ${s%-*} --servers ${s#*-}; python3 show.py $R/$v-$p-$s.json; }
for p in qwen3-30b-a3b deepseek-v3; do for s in 1-1 1-3 2-2; do
m before ./new $p $s 1,8,32 env G1_OFF=pat G1_RETURN=0
m final ./switchyard $p $s 1,2,4,8,32 env
done; done
m final ./switchyard qwen3-30b-a3b 1-3 64,96,128,256,2048 env; mv $R/final-qwen3-30b-a3b-1-3.json $R/big-qwen3-30b-a3b-1-3.json
tar cJf $OUT/r.tar.xz -C $W r
export SWITCHYARD_KEEP=$OUT/keep.txt
bash run-tests.sh 20261127; echo "run-tests: exit $?"
tar cJf $OUT/r.tar.xz -C $W r; date
