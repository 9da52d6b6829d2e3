"""Make the directory of one job on this node, taking from earlier jobs every file that did not change.

Usage: stage.py missing ROOT           < manifest   prints {"missing": [sha256, ...]}
       stage.py build ROOT DIGEST      < tar stream of manifest.json and blobs/<sha256>   prints {"job_dir": ...}

A manifest is {"files": [{"path", "sha256", "mode", "size_bytes"}, ...]}, paths relative with "/". A job's directory
`<root>/jobs/<digest>` is never changed after it got its name; its files are hard links where an earlier job had the same
content. The manifests of all jobs lie in `<root>/jobs/.manifests`.
"""

import hashlib
import json
import os
import shutil
import sys
import tarfile

import unpack


def main(arguments):
    """Run one of the two commands; 0, or 1 after saying on stderr what was wrong."""
    command, root = arguments[0], os.path.expanduser(arguments[1])
    jobs = os.path.join(root, "jobs")
    try:
        os.makedirs(os.path.join(jobs, ".manifests"), mode=0o700, exist_ok=True)
        if command == "missing":
            print(json.dumps({"missing": missing(jobs, json.load(sys.stdin))}))
        else:
            with unpack.sharing(jobs):
                job_dir = build(jobs, arguments[2], sys.stdin.buffer)
            print(json.dumps({"job_dir": job_dir}))
    except (ValueError, OSError, tarfile.TarError, EOFError) as error:
        sys.stderr.write("stage: {}\n".format(error))
        return 1
    return 0


def known_files(jobs):
    """{sha256: path} of every file of the jobs that are here."""
    found = {}
    manifests = os.path.join(jobs, ".manifests")
    for name in os.listdir(manifests):
        job = os.path.join(jobs, name[: -len(".json")])
        if not name.endswith(".json") or not os.path.isdir(job):
            continue
        with open(os.path.join(manifests, name)) as text:
            for entry in json.load(text)["files"]:
                found[entry["sha256"]] = os.path.join(job, *entry["path"].split("/"))
    return found


def missing(jobs, manifest):
    """The hashes of a manifest that no job here has, without repeats."""
    known = known_files(jobs)
    wanted = {entry["sha256"] for entry in manifest["files"]}
    return sorted(sha for sha in wanted if sha not in known or not os.path.isfile(known[sha]))


def build(jobs, digest, stream):
    """Make `<jobs>/<digest>` of the blobs in a tar stream and of the files of earlier jobs; its absolute path."""
    final = os.path.join(jobs, digest)
    partial, blobs = unpack.partial_name(jobs, digest), unpack.partial_name(jobs, digest + ".blobs")
    try:
        os.mkdir(blobs, 0o700)
        manifest = receive(stream, blobs)
        os.mkdir(partial, 0o700)
        known = known_files(jobs)
        for entry in manifest["files"]:
            place(entry, partial, blobs, known)
        write_json(os.path.join(blobs, "manifest.json"), os.path.join(jobs, ".manifests", digest + ".json"), manifest)
        try:
            os.rename(partial, final)
        except OSError:  # another process made the same job meanwhile, which is as good
            if not os.path.isdir(final):
                raise
    finally:
        unpack.remove(blobs, partial)
    return final


def receive(stream, blobs):
    """Write the blobs of a tar stream, each checked against its name; the manifest that came with them."""
    manifest = None
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            content = archive.extractfile(member)
            if member.name == "manifest.json":
                manifest = json.loads(content.read().decode("utf-8"))
                continue
            sha = member.name.split("/")[-1]
            digest = hashlib.sha256()
            with open(os.path.join(blobs, sha), "wb") as out:
                for block in iter(lambda source=content: source.read(1 << 20), b""):
                    digest.update(block)
                    out.write(block)
            if digest.hexdigest() != sha:
                raise ValueError("a file arrived damaged: {}".format(sha))
    if manifest is None:
        raise ValueError("the stream ended before the manifest")
    return manifest


def place(entry, partial, blobs, known):
    """Put one file of the manifest at its path: from the blobs, or as a link to the same content of an earlier job."""
    parts = entry["path"].split("/")
    if entry["path"].startswith("/") or ".." in parts:
        raise ValueError("refused: a path that leads outside: {!r}".format(entry["path"]))
    target = os.path.join(partial, *parts)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    source = os.path.join(blobs, entry["sha256"])
    if not os.path.exists(source):
        source = known[entry["sha256"]]
    mode = entry["mode"] & 0o555  # never written again: other jobs may share the content
    try:
        same_mode = os.stat(source).st_mode & 0o777 == mode or os.path.dirname(source) == blobs
        if not same_mode:
            raise OSError("another mode")
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    os.chmod(target, mode)


def write_json(temporary, path, document):
    with open(temporary, "w") as out:
        json.dump(document, out)
    os.rename(temporary, path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
