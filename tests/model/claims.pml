/* SPDX-License-Identifier: LGPL-2.1-or-later
 *
 * The protocol of claims: two domains that start, again and again, on one or two devices; a libvirt
 * that is killed and comes back, whose hooks go on as orphans; hooks and syncs that are killed at
 * any step; QEMUs that die at any time, or outlive what libvirt knows of them; a driver that
 * refuses. test_model.py has spin search all of it, within bounds (FIRST, SECOND, DEVICES, CRASHES,
 * SYNCS), and take out one guard after the other (the other -D names): each is needed.
 *
 * One model serves both backends. A device is what claims, locks and handles are about: a VF, or a
 * mediated device, which is "typed" while it exists, and whose name no other domain ever has: of the
 * searches, those with one domain that starts again on its device are its whole story, and those
 * with two ask for more than it needs. No driver refuses to remove one that is open; here none refuses
 * a write of 0 for that either, so nothing rests on it. Left out is on which parent a mediated device
 * is made, which has no part in whose it is.
 *
 * A start, the claim that its `prepare` makes, and the QEMU that comes of it share a number. What
 * must hold are the assertions: no write to a device of a living QEMU, none without a claim; a
 * claim goes only when its device is clear; what starts has its device, and alone; and once all is
 * dead, a sync leaves nothing. Locks are waited for without end, so spin would see a deadlock.
 */
#define NONE 9
#define domain(s) ((s) / 2)

mtype = { PREPARE, STARTED, RELEASE, SYNC,  /* what a hook does */
          NO, BORN, OPEN, DYING };          /* a QEMU: it has its device open from OPEN on, */
                                            /* and its monitor until it is DYING */
byte claim[2] = NONE;   /* on each device: the claim file, */
byte noted[2] = NONE;   /* the QEMU that is noted in it, */
byte typed[2] = NONE;   /* who put a type on the device, */
bool locked[2];         /* and its lock */
byte device[3];         /* of each start: the device in its XML, */
byte daemon[3];         /* the daemon that made it, */
mtype qemu[3] = NO;     /* and its QEMU */
byte status[2] = NONE;  /* of each domain: the QEMU in libvirt's status file, */
bool serves[2];         /* what libvirt would answer, */
byte started[2];        /* how often it was started, */
bool works[2];          /* and whether its `prepare` succeeded */
byte now = 1;           /* the daemon that runs, */
bool up = true;         /* if it does */
#define at(d, g) ((d) * 4 + (g))    /* of each daemon, for each domain: */
#define SYNCER at(0, 0)             /* (and of nobody) */
byte job[8];            /* what hook it runs, or 0, */
byte which[8];          /* and for which start */
byte hooks;             /* that are at work, orphans and syncs among them */
bool last;              /* all is dead, and a sync ends it all */

#define runs(g) (up && now == (g))
#define lives(v) ((qemu[0] != NO && device[0] == v) || (qemu[1] != NO && device[1] == v) || \
                  (qemu[2] != NO && device[2] == v))
#define has_open(s, v) ((qemu[s] == OPEN || qemu[s] == DYING) && device[s] == v)
#define listens(s) (qemu[s] == BORN || qemu[s] == OPEN)
#define owns(d, v) (claim[v] != NONE && domain(claim[v]) == d)
#ifdef NO_NOTE_CHECK
#define is_known(v) true
#else
#define is_known(v) (claim[v] == id)
#endif
#ifdef NO_HANDLES
#define held_open(v) false
#else
#define held_open(v) (has_open(0, v) || has_open(1, v) || has_open(2, v))
#endif

#ifdef NO_LOCK
#define lock(v) skip
#else
#define lock(v) atomic { !locked[v] -> locked[v] = true; held = held | (1 << v) }
#endif

inline unlock() {
  if :: held & 1 -> locked[0] = false :: else fi;
  if :: held & 2 -> locked[1] = false :: else fi;
  held = 0
}

/* Whether the start of claim ID can't become a QEMU any more, other than by its daemon's end. */
#define own_start(id) (op != SYNC && domain(id) == d && daemon[id] == g)
#define denied(id) (op == SYNC && answered && !says)
#if defined(ORPHAN_IS_OURS)
#define is_over(id) (denied(id) || (op != SYNC && domain(id) == d))
#elif defined(SYNC_IGNORES_DAEMON)
#define is_over(id) (own_start(id) || op == SYNC)
#elif defined(BY_ADDRESS)
#define is_over(id) (own_start(id) || denied(id) || op == RELEASE)
#else
#define is_over(id) (own_start(id) || denied(id))
#endif
/* Which claims an operation sees to. */
#ifdef BY_ADDRESS
#define minds(v) (claim[v] != NONE && \
                  (op == SYNC || (op == RELEASE -> device[s] == v : owns(d, v))))
#else
#define minds(v) (claim[v] != NONE && (op == SYNC || owns(d, v)))
#endif

/* The hooks that daemon G runs for domain D, one after the other; or syncs, which are nobody's.
   Each may be killed before any step that others can see. One sees to one claim: whoever finds
   several does the same with each in turn. */
#define killed !last -> goto over

proctype Hooks(byte d; byte g) {
  byte op, s, v, id, known, held, own;
  bool result, gone, answered, says;

end_ready:
  atomic { job[at(d, g)] != 0 -> op = job[at(d, g)]; s = which[at(d, g)] }
  if                                            /* read the claims */
  :: op == PREPARE -> own = (1 << device[s]) | owns(d, 0) | (owns(d, 1) << 1)
  :: else ->
     if
     :: atomic { minds(0) -> v = 0; id = claim[0]; known = noted[0] }
     :: atomic { minds(1) -> v = 1; id = claim[1]; known = noted[1] }
     :: !minds(0) && !minds(1) -> goto over
     fi
  fi;
  if
  :: op == SYNC ->                              /* then ask libvirt, where it runs */
     atomic { answered = up; says = serves[domain(id)] }
#ifdef NO_ASKED_AFTER
     atomic {
       if :: claim[v] != NONE && domain(claim[v]) == domain(id) -> id = claim[v] :: else fi };
#endif
  :: op == STARTED ->
     if
     :: atomic { status[d] != NONE && qemu[status[d]] != NO && device[status[d]] == v ->
          known = status[d] }
     :: else -> goto over
     fi;
note:
     if
     :: killed
     :: atomic { owns(d, v) && is_known(v) -> noted[v] = known; goto over }
     :: else -> goto over
     fi
  :: op == PREPARE ->
     if :: !(own & 1) :: lock(0) fi;
     if :: killed :: !(own & 2) :: lock(1) fi;
     atomic {
       if
       :: (owns(d, 0) && !(own & 1)) || (owns(d, 1) && !(own & 2)) -> goto over
       :: else -> own = owns(d, 0) | (owns(d, 1) << 1)
       fi }
  :: op == RELEASE
  fi;

next:                                           /* `prepare`: first its own leftovers, then what */
  atomic {                                      /* stands on the device */
    if
    :: op == PREPARE ->
       if
       :: own & 1 -> v = 0; own = own - 1
       :: own == 2 -> v = 1; own = 0
       :: own == 0 -> v = device[s]
       fi;
       id = claim[v]; known = noted[v];
       if
       :: id == NONE && v == device[s] -> goto unused
       :: id == NONE && v != device[s] -> goto next
       :: else
       fi
    :: else
    fi }
  atomic {
    if :: op == PREPARE :: op != PREPARE -> lock(v) fi;
look_again:
#ifndef NO_LOOK_AGAIN
    if :: claim[v] != id -> goto settled :: else -> known = noted[v] fi
#else
    skip
#endif
  }
see_daemon:
#ifndef DAEMON_LAST
  gone = !runs(daemon[id]);
#endif
see_others:
  atomic {
    if
    :: status[domain(id)] != NONE && qemu[status[domain(id)]] != NO -> goto settled
    :: held_open(v) -> goto settled
    :: listens(id) || (known != NONE && qemu[known] != NO) -> goto settled
    :: else
    fi
  }
verdict:
#ifdef DAEMON_LAST
  gone = !runs(daemon[id]);
#endif
  if :: known != NONE || gone || is_over(id) :: else -> goto settled fi;
guard:                                          /* the first write takes the word of see_others */
  if :: held_open(v) -> goto settled :: skip fi;
write_0:
  if
  :: killed
  :: typed[v] == NONE
  :: atomic { typed[v] != NONE -> assert(!lives(v)); typed[v] = NONE }
  :: typed[v] != NONE && !last -> skip          /* the driver refuses */
  fi;
read_back_0:
  if :: typed[v] == NONE :: typed[v] != NONE -> goto settled fi;
drop:
  if :: killed
     :: atomic { claim[v] == id -> assert(typed[v] == NONE); claim[v] = NONE; noted[v] = NONE }
     :: claim[v] != id
  fi;
settled:
  atomic {
    if :: op != PREPARE || claim[v] == id -> goto over :: else fi;
    v = 0; id = 0; known = 0; gone = false;
    goto next
  }

unused:
  if :: typed[v] != NONE -> goto over :: else fi;
#ifndef CLAIM_LAST
claim_first:
  if
  :: killed
  :: atomic { claim[v] == NONE -> claim[v] = s }
  :: claim[v] != NONE -> goto over
  fi;
#endif
  if :: held_open(v) -> goto take_back :: else fi;
write:
  if
  :: killed
  :: atomic { typed[v] == NONE -> assert(!lives(v)); assert(claim[v] == s); typed[v] = s }
  :: skip                                       /* the driver refuses */
  fi;
#ifdef CLAIM_LAST
  if :: killed :: claim[v] = s fi;
#endif
read_back:
  if :: atomic { typed[v] == s -> result = true; goto over } :: typed[v] != s fi;
take_back:
  if
  :: killed
  :: atomic { typed[v] == NONE && claim[v] == s -> claim[v] = NONE; noted[v] = NONE }
  :: !(typed[v] == NONE && claim[v] == s)
  fi;

over:
  atomic {
    unlock();
    hooks--;
    job[at(d, g)] = 0; which[at(d, g)] = 0;
    if :: op == PREPARE && runs(g) -> works[d] = result :: else fi;
    op = 0; s = 0; v = 0; id = 0; known = 0; own = 0; result = false;
    gone = false; answered = false; says = false;
    goto end_ready
  }
}

inline hook(op) {
  if
  :: atomic { runs(g) -> which[at(d, g)] = s; job[at(d, g)] = op; hooks++ }
  :: !runs(g) -> goto idle
  fi;
  if :: runs(g) && job[at(d, g)] == 0 :: !runs(g) -> goto idle fi
}

/* What libvirt does with a domain; whatever it was at ends when its daemon is killed. */
proctype Libvirt(byte d) {
  byte s, g;

idle:
  atomic { s = 0; g = 0 }
end_idle:
  if
  :: atomic { up && !last && status[d] == NONE && started[d] < (d -> SECOND : FIRST) ->
       s = 2 * d + started[d]; started[d]++; g = now; daemon[s] = g; serves[d] = true;
       if :: device[s] = 0 :: DEVICES == 2 && s != 0 -> device[s] = 1 fi }
  :: atomic { up && !last && status[d] != NONE -> s = status[d]; g = now }
     if
     :: atomic { runs(g) && qemu[s] != NO -> serves[d] = true }
        hook(STARTED);                          /* `reconnect` does the same */
        goto stopping
     :: runs(g) && qemu[s] == NO -> goto stopping
     :: !runs(g) -> goto idle
     fi
  fi;
  hook(PREPARE);
  if
  :: atomic { runs(g) && works[d] ->
       assert(claim[device[s]] == s && typed[device[s]] == s && !lives(device[s]));
       qemu[s] = BORN; status[d] = s }
  :: runs(g) -> goto stopping                   /* refused, or something else fails */
  :: !runs(g) -> goto idle
  fi;
  hook(STARTED);
stopping:                                       /* its QEMU may well outlive this */
  if
  :: atomic { runs(g) -> serves[d] = false; status[d] = NONE }
  :: !runs(g) -> goto idle
  fi;
  hook(RELEASE);
  if :: goto idle :: d == 0 -> hook(RELEASE) fi;
  goto idle
}

#define moves(s) \
  qemu[s] == BORN -> qemu[s] = OPEN \
  :: qemu[s] == OPEN -> qemu[s] = DYING \
  :: qemu[s] == DYING -> qemu[s] = NO

init {
  byte crashes, syncs, g;
  atomic {
    run Hooks(0, 0);
    for (g : 1 .. CRASHES + 1) { run Hooks(0, g) }
    run Libvirt(0);
#if SECOND
    for (g : 1 .. CRASHES + 1) { run Hooks(1, g) }
    run Libvirt(1);
#endif
    g = 0
  }
  do
  :: moves(0) :: moves(1) :: moves(2)
  :: atomic { up && crashes < CRASHES && !last ->
       crashes++; up = false;
       serves[0] = false; serves[1] = false; works[0] = false; works[1] = false }
  :: atomic { !up && !last -> up = true; now++ }
  :: atomic { syncs < SYNCS && !last && job[SYNCER] == 0 -> syncs++; job[SYNCER] = SYNC; hooks++ }
  :: atomic { !last && !hooks && !lives(0) && !lives(1) && !serves[0] && !serves[1] ->
       last = true; job[SYNCER] = SYNC; hooks++ }
     atomic { hooks == 0 -> job[SYNCER] = SYNC; hooks++ }
     hooks == 0;
     assert(claim[0] == NONE && claim[1] == NONE && typed[0] == NONE && typed[1] == NONE);
     break
  od
}
