D=$1; W=/tmp/w; R=$W/r; mkdir -p $R; cd $W; tar xJf $D/prog.tar.xz; [ -e $D/new.xz ] && xz -dc $D/new.xz > new && chmod +x new; date; nvidia-smi -L | head -1
cat > show.py <<'P'
import json,sys
for f in sys.argv[1:]:
    try: d=json.load(open(f))
    except Exception as e: print(f,'FAILED',e); continue
    n=f.split('/')[-1][:-5]
    print(n,' | '.join('%d: %.1f /%.1f =%.3f c%.2f'%(r['tokens'],r['layer_us_p50'],r['compute_us'],r['ratio'],r['clients_per_batch']) for r in d['rows']),flush=True)
P
t() { n=$1; shift; timeout 100 "$@" > $R/$n.txt 2>&1; echo "$n: exit $? $(tail -1 $R/$n.txt | cut -c1-120)"; }
b() { out=$1; shift; timeout 40 "$@" > $R/$out.json 2> $R/$out.err || echo "FAILED $out $(tail -c 400 $R/$out.err)"; }
m() { v=$1 p=$2 s=$3 k=$4; shift 4; b $v-$p-$s "$@" ./new --json bench moe --device cuda --preset $p --wire-dtype fp8 --seconds 0.4 --tokens $k --clients ${s%-*} --servers ${s#*-}; python3 show.py $R/$v-$p-$s.json; }
for p in qwen3-30b-a3b deepseek-v3; do for s in 1-1 1-3 2-2; do
m before $p $s 1,8,32 env G1_OFF=pat G1_RETURN=0
m parts $p $s 1,8 env G1_OFF=at G1_RETURN=0
m answers $p $s 1,8 env G1_OFF=t G1_RETURN=0
m after $p $s 1,2,4,8,32 env
done; done
for r in 0 5 10 40; do m ret$r qwen3-30b-a3b 2-2 1,8 env G1_RETURN=$r; done
m big0 qwen3-30b-a3b 1-3 128,256,512,2048 env G1_OFF=t
m big1 qwen3-30b-a3b 1-3 128,256,512,2048 env
b line ./new --json bench moe --device cuda --preset qwen3-30b-a3b --wire-dtype fp8 --seconds 0.5 --tokens 1,8 --timeline
b line13 ./new --json bench moe --device cuda --preset qwen3-30b-a3b --wire-dtype fp8 --seconds 0.5 --tokens 1 --servers 3 --timeline
python3 - <<P
import json
for f in ('line','line13'):
  d=json.load(open('$R/'+f+'.json'))
  for r in d['rows'][:1]:
    for s in r['timeline']['steps']: print(f,s['lane'],s['name'],round(s['begin_us'],1),round(s['end_us'],1))
P
for a in a0 a8; do [ -e moe_bench_$a ] && for s in 4r 1to1 2to2; do t rows-$a-$s ./moe_bench_$a --ranks 4 --shape $s --set lists --seed 2 --limit 60; done; done
for s in 4r 1to1 2to2; do t rows-def-$s ./moe_bench --ranks 4 --shape $s --set lists --seed 2 --limit 60; done
python3 - <<P
import json,glob
for f in sorted(glob.glob('$R/rows-*.txt')):
  print(f.split('/')[-1],[(r['tokens'],r['pdl'],r['median_us']) for r in map(json.loads,(l for l in open(f) if l[0]=='{')) if r['server']=='lists' and r['pdl']==-1])
P
tar cJf $OUT/r.tar.xz -C $W r; date
