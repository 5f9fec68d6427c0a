import json,glob,sys,os
# tocsv.py CALL FOLDER: a line per build, shape and tokens
call,folder=sys.argv[1:3]
for f in sorted(glob.glob(folder+'/*-*-*-*.json')):
    n=os.path.basename(f)[:-5]
    try: d=json.load(open(f))
    except Exception: continue
    for r in d['rows']:
        print(','.join(map(str,[call,n.split('-')[0],d['preset'],d['clients'],d['servers'],r['tokens'],round(r['layer_us_p50'],1),round(max(c['layer_us_p99'] for c in r['clients']),1),round(r['compute_us'],1),round(r['server_us'],1),round(r['ratio'],3),round(r['clients_per_batch'],2),sum(c['calls'] for c in r['clients']),sum(c['wrong'] for c in r['clients'])])))
